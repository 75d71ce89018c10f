// Decides which operations run next, and finds where ranks disagree. Ranks that have
// joined count as ready for everything until all have joined. Lives on
// world rank 0. Pure: no I/O, thread or clock (time is an argument), so every
// ordering bug can be replayed from a list of calls.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "control/fusion.h"
#include "control/negotiation.h"
#include "control/process_set.h"
#include "control/request.h"
#include "control/response_cache.h"

namespace polyhvd {

struct CoordinatorOptions {
  std::size_t cache_capacity = 1024;
  FusionPolicy fusion;
};

// A named operation that some ranks wait for and others have not submitted.
struct Stalled {
  ProcessSetId process_set = kWorld;
  std::string name;
  std::chrono::duration<double> age{};
  std::vector<int> ready_ranks;
  std::vector<int> absent_ranks;
  OpKind kind = OpKind::kAllreduce;
  RunCount runs{};      // before
  std::string where{};  // "train.py:88" of one of the ready ranks; empty: unknown
};

class Coordinator {
 public:
  // `sets` must outlive this.
  Coordinator(const ProcessSets& sets, CoordinatorOptions options);
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // `from` is the sender: a subtree hit speaks for its ranks, as far as they are
  // members of the set.
  // Throws Failure(kInternal) on a breach of protocol, such as a rank that
  // reports a pending operation twice; nothing can be decided after that.
  void add(const Report& report, const Subtree& from, Time now);

  // Everything that became ready, refused or evicted since the last call.
  Decision take_decision();

  // For decisions to come.
  void set_fusion_bytes_max(std::size_t bytes) noexcept { options_.fusion.bytes_max = bytes; }

  // Whether take_decision() would return something.
  bool has_decision() const noexcept;

  std::vector<Stalled> stalled(Time now, std::chrono::duration<double> at_least) const;

 private:
  using Key = std::pair<ProcessSetId, std::string>;

  // What the coordinator keeps beside the agreement. Readiness by id is the
  // steady state: a bit and a counter.
  struct Known {
    const Agreement* agreement = nullptr;  // in cache_
    std::span<const int> members;
    MemberMask ready;                    // by position
    Time since;                          // of the first of them
    std::uint64_t ready_in = 0;          // number of the decision that runs it
    Negotiation* negotiation = nullptr;  // hits become sides of it; in pending_
    std::size_t rounds = 0;              // of a template: in rounds_
    std::vector<Turn> running;           // likewise, in the decision ready_in
    std::size_t dealt = 0;               // of these, to entries of batches
    std::vector<std::string> where;      // by position; one element when all are equal
    std::list<CacheId>::iterator age;
  };

  // Who is ready for a call without a name, all by the same template. It is either here or,
  // negotiated by name, in pending_.
  struct Round {
    CacheId id = 0;
    MemberMask ready;  // by position
    Time since;
  };
  using Rounds = std::unordered_map<TurnKey, Round, TurnKeyHash>;

  void add_subtree_turn(const Report::TurnHit& hit, const Subtree& from, Time now);
  // As add_turn_side() for each of `sides`, where it comes to entering them.
  bool add_turn_sides(const Report::TurnHit& hit, Known& known, const MemberMask& sides, Time now);
  void add_turn(const Report::TurnHit& hit, Time now);
  void add_turn_side(const Report::TurnHit& hit, Known& known, int position, Time now);
  Rounds::iterator round_of(const TurnKey& key, CacheId id, Known& known, Time now);
  void end_round(Rounds::iterator entry);
  // Turns the readiness for a turn into sides of a negotiation by name.
  void withdraw(Rounds::iterator entry, Negotiation& negotiation);
  bool is_negotiated(const TurnKey& key) const;
  // Rounds that are complete since others have joined, as negotiations.
  std::vector<Key> complete_rounds(Time now);
  void refuse_rounds_of_departed(int rank);
  void refuse_running(CacheId id, Known& known);
  void refuse_rounds_of_removed(ProcessSetId set);
  std::optional<CacheId> find_template(const Agreement& agreement) const;
  void keep_few_alike(const Agreement& agreement);
  void deal_out_turns();

  void add_subtree_hit(CacheId id, const Subtree& from, Time now);
  // As add_side() for each of `sides`, where it comes to entering them.
  bool add_sides(CacheId id, Known& known, const MemberMask& sides, Time now);
  void add_hit(int rank, CacheId id, Time now);
  void add_side(CacheId id, Known& known, int position, Time now);
  void add_request(Request request, Time now);
  void add_subtree_request(const Request& request, const Subtree& from, Time now);
  void add_departure(const Departure& departure);
  void ask_again(int rank, CacheId id, Turn turn = 0);
  void add_answer(int rank);

  Known* find_known(CacheId id) noexcept;
  Negotiation& negotiation_of(const Key& key, Time now);
  // Turns the readiness of an id into sides of a negotiation by name.
  void withdraw(CacheId id, Negotiation& negotiation);
  void complete(const Key& key);
  // `requests` are those of `present`, in order, or one that stands for all of them.
  void conclude(std::span<const Request> requests, const MemberMask& present);
  // What else the agreement says, and whether it can run at all.
  std::optional<Error> fill_in(Agreement& agreement, std::span<const Request> requests,
                               const MemberMask& present) const;
  std::string why_not_add(const Agreement& agreement) const;
  CacheId define(Agreement agreement, std::vector<std::string> where);
  void mark_ready(CacheId id, Known& known, Turn turn = 0);
  void forget(CacheId id);
  void shrink_cache();

  // Whether all members of a set have reported, or have joined.
  bool is_complete(const MemberMask& present, std::span<const int> members) const;
  // A rank has joined: operations that waited only for it can run.
  void add_join(int rank);
  void complete_without_joined();
  void forget_set(ProcessSetId set);

  bool is_doomed(ProcessSetId set) const;
  void refuse_removed(const TurnKey& key, const std::string& name);
  // `waiting`: the ranks that have requested it.
  void refuse_departed(const TurnKey& key, const std::string& name,
                       const std::vector<int>& waiting);
  // How often what is refused or stalled has run before.
  RunCount runs_of(const TurnKey& key, const std::string& name) const;
  // The members that `present` holds, and that have not departed.
  std::vector<int> ranks_of(const MemberMask& present, std::span<const int> members) const;
  // Whether a request of the set is refused, now that it was.
  bool refuse_if_doomed(const Request& request);
  Request request_of(const Known& known, int position, Turn turn = 0) const;

  const ProcessSets& sets_;
  CoordinatorOptions options_;
  ResponseCache cache_;
  std::unordered_map<CacheId, Known> known_;
  std::list<CacheId> by_age_;  // least recently used first
  std::map<Key, Negotiation> pending_;
  Rounds rounds_;
  std::vector<Rounds::node_type> spare_rounds_;  // so that the steady state allocates nothing
  std::set<int> departed_;
  std::vector<Departure> failed_;  // those of departed_ that have last words, the first first
  std::set<int> joined_;
  // Resends that a rank has not answered: it is ready for more than is known here, so
  // that a join of it does not count yet.
  std::map<int, int> resends_;
  int last_joined_ = -1;
  std::vector<CacheId> ready_;
  bool has_turns_ = false;  // whether some of ready_ are templates
  Decision next_;
  std::uint64_t decision_number_ = 1;
  CacheId next_id_ = 1;
};

}  // namespace polyhvd
