// Holds the requests of a subtree back until all of it has asked for the same, and
// lets one stand for all: what the first step of a job costs does not grow with the
// ranks. Part of a relay. Pure.
//
// It does so for the first round of a name only. A name that is requested again was
// evicted, and some of its round may have gone up as hits: which ranks are still to come is
// not known here.
#pragma once

#include <list>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "control/coordinator.h"
#include "control/process_set.h"
#include "control/request.h"

namespace polyhvd {

class RequestMerger {
 public:
  // Both must outlive this.
  RequestMerger(const ProcessSets& sets, const Subtree& subtree) : sets_(sets), subtree_(subtree) {}

  // Whether the name is in its first round.
  bool takes(const Request& request) const;
  // The name will not be taken any more: some of it goes up without being seen here.
  void pass_over(const Request& request);

  // `members` of the set, by position, have asked for this; it is a request of one of
  // them, and taken. What is to go up now is added to `out`.
  void add(const Request& request, const MemberMask& members, Time now, Report& out);

  // Lets go of what was held since `before` or longer; the rest of it will go up as it
  // comes.
  void release_older(Time before, Report& out);
  // Likewise of everything in the set, which is not held back any more.
  void release(ProcessSetId set, Report& out);
  void release_all(Report& out);

 private:
  using Key = std::pair<ProcessSetId, std::string>;
  // A name that some of the subtree have asked for.
  struct Held {
    Request request;
    MemberMask seen;         // by position in the process set
    bool passed_on = false;  // what comes goes up as it is
    Time since;
    std::list<Key>::iterator place;  // in by_age_, unless passed on
  };
  using Entries = std::map<Key, Held>;

  void forget(Entries::iterator entry);
  void pass(const Request& request, const MemberMask& members, Report& out) const;
  void let_go(Held& held, Report& out);

  const ProcessSets& sets_;
  const Subtree& subtree_;
  Entries held_;
  std::set<Key> seen_before_;
  std::list<Key> by_age_;  // the oldest first
};

}  // namespace polyhvd
