// The part of the coordinator that is about operations which do not run: because a rank has left,
// because their process set was removed, or not yet.
#include <algorithm>
#include <string>
#include <tuple>

#include "control/coordinator.h"
#include "control/disagreement.h"
#include "control/uneven.h"
#include "control/unhurried.h"

namespace polyhvd {

void Coordinator::refuse_removed(const TurnKey& key, const std::string& name) {
  next_.refusals.push_back(
      {key.process_set,
       name,
       {ErrorCode::kInvalidArgument, concat({subject(key.kind, name), ": process set ",
                                             std::to_string(key.process_set), " was removed"})},
       key.kind,
       key.turn});
}

bool Coordinator::is_doomed(ProcessSetId set) const {
  return std::any_of(departed_.begin(), departed_.end(),
                     [&](int rank) { return sets_.position(set, rank).has_value(); });
}

bool Coordinator::refuse_if_doomed(const Request& request) {
  const ProcessSetId set = request.process_set;
  const TurnKey key{set, request.kind, request.turn};
  if (!sets_.contains(set) && set < sets_.added()) {
    refuse_removed(key, request.name);
    return true;
  }
  if (!is_doomed(set)) return false;
  refuse_departed(key, request.name, {request.rank});
  return true;
}

std::vector<int> Coordinator::ranks_of(const MemberMask& present,
                                       std::span<const int> members) const {
  std::vector<int> ranks;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (present.contains(i) && !departed_.contains(members[i])) ranks.push_back(members[i]);
  }
  return ranks;
}

// Calls without a name are counted by their turns.
RunCount Coordinator::runs_of(const TurnKey& key, const std::string& name) const {
  return key.turn == 0 ? cache_.runs_of(key.process_set, name) : RunCount{key.turn - 1, true};
}

void Coordinator::refuse_departed(const TurnKey& key, const std::string& name,
                                  const std::vector<int>& waiting) {
  Refusal& refusal = next_.refusals.emplace_back();
  refusal.process_set = key.process_set;
  refusal.name = name;
  refusal.kind = key.kind;
  refusal.turn = key.turn;
  refusal.error.code = ErrorCode::kPeerDeparted;
  const auto failed = std::ranges::find_if(failed_, [&](const Departure& departure) {
    return sets_.position(key.process_set, departure.rank).has_value();
  });
  if (failed != failed_.end()) {
    refusal.cause = *failed;
    refusal.error.message = concat({subject(key.kind, name), ": ", text_of_failed(*failed)});
    return;
  }
  std::vector<int> gone;
  for (const int rank : departed_) {
    if (sets_.position(key.process_set, rank)) gone.push_back(rank);
  }
  refusal.error.message = text_of_departed(key.kind, name, runs_of(key, name), gone, waiting);
}

std::vector<Stalled> Coordinator::stalled(Time now, std::chrono::duration<double> at_least) const {
  std::vector<Stalled> found;
  const auto add_if_old = [&](const TurnKey& key, const std::string& name, Time since,
                              const MemberMask& ready, const std::vector<std::string>& where) {
    const std::chrono::duration<double> age = now - since;
    if (ready.empty() || age < at_least || is_unhurried(name)) return;
    Stalled& stalled = found.emplace_back(Stalled{key.process_set, name, age, {}, {}, key.kind});
    stalled.runs = runs_of(key, name);
    const std::span<const int> members = sets_.members(key.process_set);
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (ready.contains(i)) {
        if (stalled.ready_ranks.empty() && !where.empty()) {
          stalled.where = where[std::min(i, where.size() - 1)];
        }
        stalled.ready_ranks.push_back(members[i]);
      } else if (!joined_.contains(members[i])) {
        stalled.absent_ranks.push_back(members[i]);
      }
    }
  };
  for (const auto& [key, negotiation] : pending_) {
    add_if_old({key.first, negotiation.first.kind, negotiation.first.turn}, key.second,
               negotiation.since, negotiation.present, {negotiation.first.where});
  }
  for (const auto& [id, known] : known_) {
    const Agreement& agreement = *known.agreement;
    add_if_old({agreement.process_set, agreement.kind, 0}, agreement.name, known.since, known.ready,
               known.where);
  }
  for (const auto& [key, round] : rounds_) {
    add_if_old(key, TurnName(key.kind, key.turn).text(), round.since, round.ready, {});
  }
  std::sort(found.begin(), found.end(), [](const Stalled& a, const Stalled& b) {
    if (a.age != b.age) return a.age > b.age;
    return std::tie(a.process_set, a.name) < std::tie(b.process_set, b.name);
  });
  return found;
}

}  // namespace polyhvd
