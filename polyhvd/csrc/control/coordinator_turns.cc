// The part of the coordinator that is about calls without a name: those of equal turns are one
// operation. Mostly all ranks name one template; else it is negotiated like any other.
#include <algorithm>
#include <string>
#include <utility>

#include "control/coordinator.h"

namespace polyhvd {
namespace {

// Templates that differ only in factors, roots or rows. Programs whose rows differ every time
// would fill the cache with them.
constexpr std::size_t kAlikeMax = 16;
constexpr std::size_t kSpareRoundsMax = 1024;

[[noreturn]] void fail_not_member(const Report::TurnHit& hit) {
  throw Failure(ErrorCode::kInternal, "coordinator: a hit for id " + std::to_string(hit.id) +
                                          " in turn " + std::to_string(hit.turn) +
                                          " from outside its process set");
}

}  // namespace

// ---- reports --------------------------------------------------------------------

void Coordinator::add_subtree_turn(const Report::TurnHit& hit, const Subtree& from, Time now) {
  Known* known = find_known(hit.id);
  if (known == nullptr) {
    for (const int rank : from.ranks()) ask_again(rank, hit.id, hit.turn);
    return;
  }
  const MemberMask& sides = from.members(known->agreement->process_set);
  if (sides.empty()) fail_not_member(hit);
  if (add_turn_sides(hit, *known, sides, now)) return;
  for (std::size_t i = 0; i < known->members.size(); ++i) {
    if (!sides.contains(i)) continue;
    add_turn_side(hit, *known, static_cast<int>(i), now);
    known = find_known(hit.id);
    if (known == nullptr) return;  // that was the last side, and the id had to make room
  }
}

bool Coordinator::add_turn_sides(const Report::TurnHit& hit, Known& known, const MemberMask& sides,
                                 Time now) {
  if (!pending_.empty() || !joined_.empty() || !departed_.empty()) return false;
  const Agreement& agreement = *known.agreement;
  const auto entry =
      round_of({agreement.process_set, agreement.kind, hit.turn}, hit.id, known, now);
  Round& round = entry->second;
  if (round.id != hit.id || !round.ready.merge(sides)) return false;
  if (round.ready.count() == known.members.size()) {
    end_round(entry);
    mark_ready(hit.id, known, hit.turn);
  }
  return true;
}

void Coordinator::add_turn(const Report::TurnHit& hit, Time now) {
  Known* known = find_known(hit.id);
  if (known == nullptr) {
    ask_again(hit.rank, hit.id, hit.turn);
    return;
  }
  const auto position = position_in(known->members, hit.rank);
  if (!position) fail_not_member(hit);
  add_turn_side(hit, *known, *position, now);
}

void Coordinator::add_turn_side(const Report::TurnHit& hit, Known& known, int position, Time now) {
  const Agreement& agreement = *known.agreement;
  const TurnKey key{agreement.process_set, agreement.kind, hit.turn};
  if (is_doomed(key.process_set)) {
    refuse_departed(key, TurnName(key.kind, key.turn).text(),
                    {known.members[static_cast<std::size_t>(position)]});
    return;
  }
  const auto found = rounds_.find(key);
  const bool differs = found != rounds_.end() && found->second.id != hit.id;
  if (differs || is_negotiated(key)) {
    add_request(request_of(known, position, hit.turn), now);
    return;
  }
  const auto entry = round_of(key, hit.id, known, now);
  Round& round = entry->second;
  if (!round.ready.insert(static_cast<std::size_t>(position))) {
    throw Failure(
        ErrorCode::kInternal,
        "coordinator: rank " + std::to_string(known.members[static_cast<std::size_t>(position)]) +
            " reported '" + TurnName(key.kind, key.turn).text() + "' again before it ran");
  }
  if (round.ready.count() == known.members.size()) {
    end_round(entry);
    mark_ready(hit.id, known, hit.turn);
    return;
  }
  if (joined_.empty() || !is_complete(round.ready, known.members)) return;
  const Key name{key.process_set, TurnName(key.kind, key.turn).text()};
  withdraw(entry, negotiation_of(name, now));
  complete(name);
}

// ---- rounds ---------------------------------------------------------------------

Coordinator::Rounds::iterator Coordinator::round_of(const TurnKey& key, CacheId id, Known& known,
                                                    Time now) {
  auto entry = rounds_.find(key);
  if (entry != rounds_.end()) return entry;
  if (spare_rounds_.empty()) {
    entry = rounds_.try_emplace(key).first;
  } else {
    spare_rounds_.back().key() = key;
    entry = rounds_.insert(std::move(spare_rounds_.back())).position;
    spare_rounds_.pop_back();
  }
  Round& round = entry->second;
  round.id = id;
  round.ready = known.ready;  // which is empty, and as wide as the set
  round.since = now;
  ++known.rounds;
  return entry;
}

void Coordinator::end_round(Rounds::iterator entry) {
  --known_.at(entry->second.id).rounds;
  auto node = rounds_.extract(entry);
  if (spare_rounds_.size() < kSpareRoundsMax) spare_rounds_.push_back(std::move(node));
}

void Coordinator::withdraw(Rounds::iterator entry, Negotiation& negotiation) {
  const auto& [key, round] = *entry;
  const Known& known = known_.at(round.id);
  negotiation.since = round.since;
  for (std::size_t i = 0; i < known.members.size(); ++i) {
    if (!round.ready.contains(i)) continue;
    negotiation.add(request_of(known, static_cast<int>(i), key.turn), i);
  }
  end_round(entry);
}

bool Coordinator::is_negotiated(const TurnKey& key) const {
  return !pending_.empty() &&
         pending_.contains({key.process_set, TurnName(key.kind, key.turn).text()});
}

std::vector<Coordinator::Key> Coordinator::complete_rounds(Time now) {
  std::vector<TurnKey> found;
  for (const auto& [key, round] : rounds_) {
    if (is_complete(round.ready, sets_.members(key.process_set))) found.push_back(key);
  }
  std::ranges::sort(found);
  std::vector<Key> names;
  for (const TurnKey& key : found) {
    names.emplace_back(key.process_set, TurnName(key.kind, key.turn).text());
    withdraw(rounds_.find(key), negotiation_of(names.back(), now));
  }
  return names;
}

// ---- what fails -----------------------------------------------------------------

void Coordinator::refuse_rounds_of_departed(int rank) {
  std::vector<TurnKey> found;
  for (const auto& [key, round] : rounds_) {
    if (sets_.position(key.process_set, rank)) found.push_back(key);
  }
  std::ranges::sort(found);
  for (const TurnKey& key : found) {
    const auto entry = rounds_.find(key);
    refuse_departed(key, TurnName(key.kind, key.turn).text(),
                    ranks_of(entry->second.ready, sets_.members(key.process_set)));
    end_round(entry);
  }
}

// Agreed but not announced counts as pending: see add_departure().
void Coordinator::refuse_running(CacheId id, Known& known) {
  if (known.running.empty()) return;
  std::erase(ready_, id);
  known.ready_in = 0;
  const Agreement& agreement = *known.agreement;
  for (const Turn turn : known.running) {
    refuse_departed({agreement.process_set, agreement.kind, turn},
                    TurnName(agreement.kind, turn).text(), {});
  }
  known.running.clear();
}

void Coordinator::refuse_rounds_of_removed(ProcessSetId set) {
  std::vector<TurnKey> found;
  for (const auto& [key, round] : rounds_) {
    if (key.process_set == set) found.push_back(key);
  }
  std::ranges::sort(found);
  for (const TurnKey& key : found) {
    refuse_removed(key, TurnName(key.kind, key.turn).text());
    end_round(rounds_.find(key));
  }
}

// ---- templates ------------------------------------------------------------------

std::optional<CacheId> Coordinator::find_template(const Agreement& agreement) const {
  if (changes_membership(agreement.kind)) return std::nullopt;  // each is negotiated again
  for (const CacheId id : cache_.alike(agreement)) {
    if (known_.contains(id) && *cache_.get(id) == agreement) return id;
  }
  return std::nullopt;
}

// Makes room for another one: evicts the least recently run one that no rank waits for.
void Coordinator::keep_few_alike(const Agreement& agreement) {
  std::size_t count = 0;
  const Known* oldest = nullptr;
  CacheId oldest_id = 0;
  for (const CacheId id : cache_.alike(agreement)) {
    const Known* known = find_known(id);
    if (known == nullptr) continue;
    ++count;
    const bool is_free = known->rounds == 0 && known->ready_in != decision_number_;
    if (!is_free || (oldest != nullptr && oldest->ready_in <= known->ready_in)) continue;
    oldest = known;
    oldest_id = id;
  }
  if (count >= kAlikeMax && oldest != nullptr) forget(oldest_id);
}

// Which turn each entry of a batch is. Entries of one template are equal, so that it does not
// matter which of them is which, as long as the turns are in order.
void Coordinator::deal_out_turns() {
  has_turns_ = false;
  for (Batch& batch : next_.batches) {
    for (std::size_t i = 0; i < batch.ids.size(); ++i) {
      Known& known = known_.at(batch.ids[i]);
      if (known.running.empty()) continue;
      batch.turns.resize(batch.ids.size());
      batch.turns[i] = known.running[known.dealt++];
    }
  }
  for (const CacheId id : ready_) {
    Known& known = known_.at(id);
    known.running.clear();
    known.dealt = 0;
  }
}

}  // namespace polyhvd
