// An inner node of the control tree: merges what its children and its own rank
// report, so that messages per rank do not grow with the world. Pure.
#pragma once

#include <chrono>
#include <cstddef>
#include <list>
#include <set>
#include <span>
#include <unordered_map>
#include <vector>

#include "control/coordinator.h"
#include "control/process_set.h"
#include "control/request.h"
#include "control/request_merger.h"
#include "control/response_cache.h"

namespace polyhvd {

class Relay {
 public:
  // `ranks` are the world ranks at and below this node. `sets` must outlive this.
  Relay(const ProcessSets& sets, std::vector<int> ranks);

  // A report of one child, or of this node's own rank: `from` is the sender.
  // `cache` is this node's replica.
  void add(const Report& report, const Subtree& from, const ResponseCache& cache, Time now);

  // What is to be sent to the parent now. A hit waits here until the whole
  // subtree agrees, but no longer than `patience`, so that stalls are seen above; a
  // request of a new name no longer than the other.
  Report take_report(Time now, std::chrono::duration<double> patience,
                     std::chrono::duration<double> patience_in_first_round);

  // The set was removed: what was asked for in it goes up, to be refused.
  void remove(ProcessSetId set);

  // An id was evicted or redefined: its partial hits go up as they are.
  void withdraw(CacheId id);

  // A call without a name is decided.
  void end_turn(const TurnKey& key);

  // An operation of the set was refused because a member has departed: none of
  // it will run any more. What is held back goes up, and later hits at once.
  void doom(ProcessSetId set);

  // All ranks have joined: every rank takes part again.
  void end_join() noexcept { joined_ = false; }

 private:
  // Who was seen for an id in this round. Kept between rounds, until the id is
  // evicted, so that the steady state allocates nothing.
  struct Partial {
    ProcessSetId set = kWorld;
    std::span<const int> members;
    std::size_t expected = 0;  // members within the subtree
    MemberMask seen;           // by position in the process set
    Time since;
    bool waiting = false;    // in waiting_, not in idle_
    bool passed_on = false;  // this round goes up rank by rank, at once
    std::list<CacheId>::iterator place;
  };
  // What was seen of a call without a name, until it is decided.
  struct Round {
    CacheId id = 0;
    MemberMask seen;  // by position in the process set
    Time since;
    bool waiting = false;    // in waiting_rounds_
    bool passed_on = false;  // what comes goes up as it is
    std::list<TurnKey>::iterator place;
  };

  void add_subtree_turn(const Report::TurnHit& hit, const Subtree& from, const ResponseCache& cache,
                        Time now);
  void add_turn(const Report::TurnHit& hit, const ResponseCache& cache, Time now);
  void add_turn_sides(const Report::TurnHit& hit, const Agreement& agreement,
                      const MemberMask& sides, Time now);
  void pass_on_turns(const Report::TurnHit& hit, ProcessSetId set, const MemberMask& sides);
  void pass_on_turn_request(const Request& request);
  void flush(const TurnKey& key, Round& round);
  void forget_rounds(ProcessSetId set);
  void add_subtree_hit(CacheId id, const Subtree& from, const ResponseCache& cache, Time now);
  void add_hit(int rank, CacheId id, const ResponseCache& cache, Time now);
  void add_member(CacheId id, Partial& partial, int position, Time now);
  // After a rank was seen: the round is over, or waits for the rest.
  void settle(CacheId id, Partial& partial, Time now);
  void add_subtree_request(const Request& request, const MemberMask& members,
                           const ResponseCache& cache, Time now);
  void add_request(const Request& request, const ResponseCache& cache, Time now);
  void pass_on_request(const Request& request, const ResponseCache& cache);
  void add_departure(const Departure& departure);
  void begin_join();
  bool is_passed_through(const Agreement* agreement) const;

  Partial& partial_of(CacheId id, ProcessSetId set);
  void flush(CacheId id, Partial& partial);
  void stop_waiting(Partial& partial);
  void end_round(Partial& partial);

  const ProcessSets& sets_;
  const Subtree subtree_;
  RequestMerger merger_;  // of names that have no id
  std::unordered_map<CacheId, Partial> partial_;
  std::list<CacheId> waiting_;  // hits held back, the oldest first
  std::list<CacheId> idle_;
  std::unordered_map<TurnKey, Round, TurnKeyHash> rounds_;
  std::list<TurnKey> waiting_rounds_;  // with hits held back, the oldest first
  std::set<ProcessSetId> doomed_;
  bool joined_ = false;  // a rank below has joined: subtrees are never complete
  Report next_;
};

}  // namespace polyhvd
