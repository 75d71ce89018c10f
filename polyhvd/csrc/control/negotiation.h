// What ranks ask for under one name until all have asked, and what they agree on.
// Pure; the coordinator decides what follows.
#pragma once

#include <chrono>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "control/process_set.h"
#include "control/request.h"

namespace polyhvd {

using Time = std::chrono::steady_clock::time_point;

// An operation that at least one member asked for in full: every side is a request,
// those that came as hits included. Usually all requests are the same.
struct Negotiation {
  // False when a side was there already. `request` is one of `sides`.
  bool add(Request request, std::size_t position);
  bool add(const Request& request, const MemberMask& sides);
  // Those of `present`, in order, or one that stands for all of them.
  std::vector<Request> take_requests();
  bool is_join() const;

  std::span<const int> members;
  MemberMask present;                     // by position in the process set
  Request first;                          // of all of them that are not in `others`
  std::map<std::size_t, Request> others;  // members whose request differs, by position
  Time since;
  CacheId cached = 0;  // the id that leads here as long as this is pending, or 0
};

// The first member's fields stand for all.
Agreement agreement_of(std::span<const Request> requests);

// Sets the first dimensions to 0; false for a scalar, which has none.
bool clear_rows(Agreement& agreement);

// Fills in rows and the first dimensions of what an allgather yields; members that
// are not present have no rows. False when there is no such result: a scalar, or
// more rows than can be counted.
bool add_up_rows(Agreement& agreement, std::span<const Request> requests, const MemberMask& present,
                 std::size_t members);

// Lines of the callers by position; one element when all are equal.
std::vector<std::string> places_of(std::span<const Request> requests, std::span<const int> members);

}  // namespace polyhvd
