#include "process_set.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "error.h"

namespace polyhvd {

std::optional<int> position_in(std::span<const int> members, int world_rank) noexcept {
  if (world_rank < 0) return std::nullopt;
  // The world, and any set that starts like it, needs no search.
  const auto guess = static_cast<std::size_t>(world_rank);
  if (guess < members.size() && members[guess] == world_rank) return world_rank;
  const auto found = std::lower_bound(members.begin(), members.end(), world_rank);
  if (found == members.end() || *found != world_rank) return std::nullopt;
  return static_cast<int>(found - members.begin());
}

ProcessSets::ProcessSets(int world_size) : world_size_(world_size) {
  if (world_size < 1) {
    throw Failure(ErrorCode::kInvalidArgument,
                  "a world needs at least one rank, got " + std::to_string(world_size));
  }
  std::vector<int> world(static_cast<std::size_t>(world_size));
  std::iota(world.begin(), world.end(), 0);
  members_.emplace(kWorld, std::move(world));
}

ProcessSetId ProcessSets::add(std::vector<int> ranks) {
  if (ranks.empty()) {
    throw Failure(ErrorCode::kInvalidArgument, "a process set needs at least one rank");
  }
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i] < 0 || ranks[i] >= world_size_) {
      throw Failure(ErrorCode::kInvalidArgument, "process set: rank " + std::to_string(ranks[i]) +
                                                     " is not in the world of " +
                                                     std::to_string(world_size_) + " ranks");
    }
    if (i > 0 && ranks[i - 1] >= ranks[i]) {
      throw Failure(ErrorCode::kInvalidArgument,
                    "process set: ranks must be sorted and distinct, got " +
                        std::to_string(ranks[i]) + " after " + std::to_string(ranks[i - 1]));
    }
  }
  const ProcessSetId id = next_++;
  members_.emplace(id, std::move(ranks));
  return id;
}

void ProcessSets::remove(ProcessSetId id) { removed_.insert(members_.extract(id)); }

std::optional<ProcessSetId> ProcessSets::find(std::span<const int> ranks) const noexcept {
  for (const auto& [id, members] : members_) {
    if (std::ranges::equal(members, ranks)) return id;
  }
  return std::nullopt;
}

std::span<const int> ProcessSets::members(ProcessSetId id) const {
  const auto found = members_.find(id);
  return found != members_.end() ? found->second : removed_.at(id);
}

std::optional<int> ProcessSets::position(ProcessSetId id, int world_rank) const {
  const auto found = members_.find(id);
  if (found == members_.end()) return std::nullopt;
  return position_in(found->second, world_rank);
}

std::vector<ProcessSetId> ProcessSets::ids() const {
  std::vector<ProcessSetId> ids;
  ids.reserve(members_.size());
  for (const auto& [id, ranks] : members_) ids.push_back(id);
  return ids;
}

Subtree::Subtree(const ProcessSets& sets, std::vector<int> ranks)
    : sets_(&sets), ranks_(std::move(ranks)), world_(mask_of(kWorld)) {}

const MemberMask& Subtree::members(ProcessSetId id) const {
  if (id == kWorld) return world_;
  const auto found = others_.find(id);
  return found != others_.end() ? found->second : others_.emplace(id, mask_of(id)).first->second;
}

MemberMask Subtree::mask_of(ProcessSetId id) const {
  const std::span<const int> members = sets_->members(id);
  MemberMask mask(members.size());
  for (const int rank : ranks_) {
    if (const auto position = position_in(members, rank)) {
      mask.insert(static_cast<std::size_t>(*position));
    }
  }
  return mask;
}

}  // namespace polyhvd
