// The part of a relay that is about calls without a name. What it knows of one ends when
// it is decided, which is seen here as it is everywhere.
#include <string>
#include <utility>

#include "control/relay.h"

namespace polyhvd {
namespace {

[[noreturn]] void fail_not_member(const Report::TurnHit& hit) {
  throw Failure(ErrorCode::kInternal, "a hit for id " + std::to_string(hit.id) + " in turn " +
                                          std::to_string(hit.turn) +
                                          " came from outside its process set");
}

}  // namespace

void Relay::add_subtree_turn(const Report::TurnHit& hit, const Subtree& from,
                             const ResponseCache& cache, Time now) {
  const Agreement* agreement = cache.get(hit.id);
  if (is_passed_through(agreement)) {
    for (const int rank : from.ranks()) {
      if (agreement == nullptr || sets_.position(agreement->process_set, rank)) {
        next_.turns.push_back({rank, hit.id, hit.turn});
      }
    }
    return;
  }
  const MemberMask& sides = from.members(agreement->process_set);
  if (sides.empty()) fail_not_member(hit);
  add_turn_sides(hit, *agreement, sides, now);
}

void Relay::add_turn(const Report::TurnHit& hit, const ResponseCache& cache, Time now) {
  const Agreement* agreement = cache.get(hit.id);
  if (is_passed_through(agreement)) {
    next_.turns.push_back(hit);
    return;
  }
  const std::span<const int> members = sets_.members(agreement->process_set);
  const auto position = position_in(members, hit.rank);
  if (!position) fail_not_member(hit);
  MemberMask one(members.size());
  one.insert(static_cast<std::size_t>(*position));
  add_turn_sides(hit, *agreement, one, now);
}

void Relay::add_turn_sides(const Report::TurnHit& hit, const Agreement& agreement,
                           const MemberMask& sides, Time now) {
  const ProcessSetId set = agreement.process_set;
  const TurnKey key{set, agreement.kind, hit.turn};
  const auto [entry, fresh] = rounds_.try_emplace(key);
  Round& round = entry->second;
  if (fresh) {
    round.id = hit.id;
    round.seen = MemberMask(sets_.members(set).size());
  }
  // Ranks that name other ids disagree, or know of different decisions: the coordinator judges.
  if (round.id != hit.id) flush(key, round);
  if (round.passed_on || !round.seen.merge(sides)) {
    flush(key, round);
    pass_on_turns(hit, set, sides);
    return;
  }
  if (round.seen.count() == subtree_.members(set).count()) {
    if (round.waiting) waiting_rounds_.erase(round.place);
    round.waiting = false;
    round.passed_on = true;
    next_.subtree_turns.push_back({0, hit.id, hit.turn});
  } else if (!round.waiting) {
    round.waiting = true;
    round.since = now;
    round.place = waiting_rounds_.insert(waiting_rounds_.end(), key);
  }
}

void Relay::pass_on_turns(const Report::TurnHit& hit, ProcessSetId set, const MemberMask& sides) {
  const std::span<const int> members = sets_.members(set);
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (sides.contains(i)) next_.turns.push_back({members[i], hit.id, hit.turn});
  }
}

// The call is negotiated, so the coordinator needs every side of it.
void Relay::pass_on_turn_request(const Request& request) {
  next_.requests.push_back(request);
  if (joined_ || doomed_.contains(request.process_set)) return;
  if (!sets_.contains(request.process_set)) return;
  const TurnKey key{request.process_set, request.kind, request.turn};
  flush(key, rounds_[key]);
}

// Sends what was held back, and the rest of this call as it comes.
void Relay::flush(const TurnKey& key, Round& round) {
  round.passed_on = true;
  if (!round.waiting) return;
  round.waiting = false;
  waiting_rounds_.erase(round.place);
  pass_on_turns({0, round.id, key.turn}, key.process_set, round.seen);
}

void Relay::end_turn(const TurnKey& key) {
  const auto found = rounds_.find(key);
  if (found == rounds_.end()) return;
  if (found->second.waiting) waiting_rounds_.erase(found->second.place);
  rounds_.erase(found);
}

void Relay::remove(ProcessSetId set) {
  merger_.release(set, next_);
  forget_rounds(set);
}

void Relay::forget_rounds(ProcessSetId set) {
  for (auto at = rounds_.begin(); at != rounds_.end();) {
    if (at->first.process_set != set) {
      ++at;
      continue;
    }
    flush(at->first, at->second);
    at = rounds_.erase(at);
  }
}

}  // namespace polyhvd
