#include "control/relay.h"

#include <algorithm>
#include <string>
#include <utility>

namespace polyhvd {
namespace {

[[noreturn]] void fail_not_member(const std::string& what) {
  throw Failure(ErrorCode::kInternal, what + " came from outside its process set");
}
[[noreturn]] void fail_not_member(CacheId id) {
  fail_not_member("a hit for id " + std::to_string(id));
}

}  // namespace

Relay::Relay(const ProcessSets& sets, std::vector<int> ranks)
    : sets_(sets), subtree_(sets, std::move(ranks)), merger_(sets, subtree_) {}

void Relay::add(const Report& report, const Subtree& from, const ResponseCache& cache, Time now) {
  for (const CacheId id : report.subtree_hits) add_subtree_hit(id, from, cache, now);
  for (const Report::Hit& hit : report.hits) add_hit(hit.rank, hit.id, cache, now);
  for (const Report::TurnHit& hit : report.subtree_turns) add_subtree_turn(hit, from, cache, now);
  for (const Report::TurnHit& hit : report.turns) add_turn(hit, cache, now);
  for (const Request& request : report.subtree_requests) {
    add_subtree_request(request, from.members(request.process_set), cache, now);
  }
  for (const Request& request : report.requests) add_request(request, cache, now);
  for (const Departure& departure : report.departures) add_departure(departure);
  next_.answers.insert(next_.answers.end(), report.answers.begin(), report.answers.end());
}

Report Relay::take_report(Time now, std::chrono::duration<double> patience,
                          std::chrono::duration<double> patience_in_first_round) {
  while (!waiting_.empty()) {
    const CacheId id = waiting_.front();
    Partial& partial = partial_.at(id);
    if (now - partial.since < patience) break;
    flush(id, partial);
  }
  while (!waiting_rounds_.empty()) {
    const TurnKey key = waiting_rounds_.front();
    Round& round = rounds_.at(key);
    if (now - round.since < patience) break;
    flush(key, round);
  }
  merger_.release_older(now - std::chrono::duration_cast<Time::duration>(patience_in_first_round),
                        next_);
  return std::exchange(next_, {});
}

void Relay::withdraw(CacheId id) {
  for (auto at = waiting_rounds_.begin(); at != waiting_rounds_.end();) {
    const TurnKey key = *at++;
    Round& round = rounds_.at(key);
    if (round.id == id) flush(key, round);
  }
  const auto found = partial_.find(id);
  if (found == partial_.end()) return;
  flush(id, found->second);
  idle_.erase(found->second.place);
  partial_.erase(found);
}

void Relay::add_subtree_hit(CacheId id, const Subtree& from, const ResponseCache& cache, Time now) {
  const Agreement* agreement = cache.get(id);
  if (is_passed_through(agreement)) {
    // Whose hits these are is known above, or no longer matters.
    for (const int rank : from.ranks()) {
      if (agreement == nullptr || sets_.position(agreement->process_set, rank)) {
        next_.hits.push_back({rank, id});
      }
    }
    return;
  }
  Partial& partial = partial_of(id, agreement->process_set);
  const MemberMask& members = from.members(agreement->process_set);
  if (members.empty()) fail_not_member(id);
  if (!partial.passed_on && partial.seen.merge(members)) {
    settle(id, partial, now);
    return;
  }
  for (std::size_t i = 0; i < partial.members.size(); ++i) {
    if (members.contains(i)) add_member(id, partial, static_cast<int>(i), now);
  }
}

void Relay::add_hit(int rank, CacheId id, const ResponseCache& cache, Time now) {
  const Agreement* agreement = cache.get(id);
  if (is_passed_through(agreement)) {
    next_.hits.push_back({rank, id});
    return;
  }
  Partial& partial = partial_of(id, agreement->process_set);
  const auto position = position_in(partial.members, rank);
  if (!position) fail_not_member(id);
  add_member(id, partial, *position, now);
}

void Relay::add_member(CacheId id, Partial& partial, int position, Time now) {
  const auto index = static_cast<std::size_t>(position);
  if (!partial.seen.insert(index)) {
    // The round before was refused above because a rank departed, and this hit
    // belongs to the next. The coordinator judges; nothing is merged any more.
    flush(id, partial);
    partial.seen.clear();
    partial.seen.insert(index);
  }
  if (partial.passed_on) next_.hits.push_back({partial.members[index], id});
  settle(id, partial, now);
}

void Relay::settle(CacheId id, Partial& partial, Time now) {
  if (partial.seen.count() == partial.expected) {
    if (!partial.passed_on) next_.subtree_hits.push_back(id);
    end_round(partial);
  } else if (!partial.passed_on && !partial.waiting) {
    partial.waiting = true;
    partial.since = now;
    waiting_.splice(waiting_.end(), idle_, partial.place);
  }
}

void Relay::add_subtree_request(const Request& request, const MemberMask& members,
                                const ResponseCache& cache, Time now) {
  if (members.empty()) fail_not_member(request.name);
  const bool merges = request.turn == 0 && !joined_ && !doomed_.contains(request.process_set) &&
                      sets_.contains(request.process_set) &&
                      !cache.id_of(request.process_set, request.name) && merger_.takes(request);
  if (merges) {
    merger_.add(request, members, now, next_);
    return;
  }
  if (request.turn == 0) merger_.pass_over(request);
  const std::span<const int> ranks = sets_.members(request.process_set);
  Request of_one = request;
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (!members.contains(i)) continue;
    of_one.rank = ranks[i];
    pass_on_request(of_one, cache);
  }
}

void Relay::add_request(const Request& request, const ResponseCache& cache, Time now) {
  const auto position = sets_.position(request.process_set, request.rank);
  if (request.kind == OpKind::kJoin || !position) {
    pass_on_request(request, cache);
    return;
  }
  MemberMask one(sets_.members(request.process_set).size());
  one.insert(static_cast<std::size_t>(*position));
  add_subtree_request(request, one, cache, now);
}

void Relay::pass_on_request(const Request& request, const ResponseCache& cache) {
  if (request.kind == OpKind::kJoin) begin_join();  // after what is let go
  if (request.turn != 0) {
    pass_on_turn_request(request);
    return;
  }
  next_.requests.push_back(request);
  if (joined_ || doomed_.contains(request.process_set)) return;
  const auto id = cache.id_of(request.process_set, request.name);
  if (!id) return;
  // The name is negotiated again, so the coordinator needs every side of it.
  Partial& partial = partial_of(*id, request.process_set);
  const auto position = position_in(partial.members, request.rank);
  if (!position) fail_not_member(*id);
  flush(*id, partial);
  if (!partial.seen.insert(static_cast<std::size_t>(*position))) {
    partial.seen.clear();
    partial.seen.insert(static_cast<std::size_t>(*position));
  }
  if (partial.seen.count() == partial.expected) end_round(partial);
}

void Relay::add_departure(const Departure& departure) {
  next_.departures.push_back(departure);
  for (const ProcessSetId set : sets_.ids()) {
    if (sets_.position(set, departure.rank)) doom(set);
  }
}

void Relay::begin_join() {
  if (std::exchange(joined_, true)) return;
  merger_.release_all(next_);
  for (auto& [id, partial] : partial_) {
    flush(id, partial);
    end_round(partial);
  }
  for (auto& [key, round] : rounds_) flush(key, round);
  rounds_.clear();
}

// Whether hits go up at once, as they are.
bool Relay::is_passed_through(const Agreement* agreement) const {
  return agreement == nullptr || joined_ || doomed_.contains(agreement->process_set);
}

void Relay::doom(ProcessSetId set) {
  if (!doomed_.insert(set).second) return;
  if (set == kWorld) joined_ = false;  // the join has failed, too
  merger_.release(set, next_);
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    const CacheId id = *at++;
    Partial& partial = partial_.at(id);
    if (partial.set == set) flush(id, partial);
  }
  forget_rounds(set);
}

Relay::Partial& Relay::partial_of(CacheId id, ProcessSetId set) {
  const auto [entry, fresh] = partial_.try_emplace(id);
  Partial& partial = entry->second;
  if (!fresh) return partial;
  partial.set = set;
  partial.members = sets_.members(set);
  partial.seen = MemberMask(partial.members.size());
  partial.expected = subtree_.members(set).count();
  partial.place = idle_.insert(idle_.end(), id);
  return partial;
}

// Sends what was held back, and the rest of this round as it comes.
void Relay::flush(CacheId id, Partial& partial) {
  if (partial.waiting) {
    for (std::size_t i = 0; i < partial.members.size(); ++i) {
      if (partial.seen.contains(i)) next_.hits.push_back({partial.members[i], id});
    }
  }
  stop_waiting(partial);
  partial.passed_on = true;
}

void Relay::stop_waiting(Partial& partial) {
  if (!partial.waiting) return;
  partial.waiting = false;
  idle_.splice(idle_.end(), waiting_, partial.place);
}

void Relay::end_round(Partial& partial) {
  stop_waiting(partial);
  partial.seen.clear();
  partial.passed_on = false;
}

}  // namespace polyhvd
