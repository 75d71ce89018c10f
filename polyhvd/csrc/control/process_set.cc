#include "control/process_set.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <string>
#include <utility>

#include "control/error.h"

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
  sets_.emplace(kWorld, Set{std::move(world), {}});
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
  if (sets_.size() >= kProcessSetsMax) {
    throw Failure(ErrorCode::kInvalidArgument,
                  "there are " + std::to_string(kProcessSetsMax) +
                      " process sets, which is the limit; remove one first");
  }
  // One that was used is preferred: memory that was never touched takes none.
  Place place{.index = sets_.size()};
  if (!free_.empty()) {
    place = free_.front();
    free_.pop_front();
  }
  const ProcessSetId id = next_++;
  sets_.emplace(id, Set{std::move(ranks), place});
  return id;
}

void ProcessSets::remove(ProcessSetId id) {
  const Place& place = sets_.at(id).place;
  free_.push_back({place.index, place.turn + 1, ++removals_});
  removed_.insert(sets_.extract(id));
  removed_in_order_.push_back(id);
}

std::uint64_t ProcessSets::settle_removal() {
  if (++settled_ > kProcessSetsMax) {
    removed_.erase(removed_in_order_.front());
    removed_in_order_.pop_front();
  }
  return settled_;
}

std::optional<ProcessSetId> ProcessSets::find(std::span<const int> ranks) const noexcept {
  for (const auto& [id, set] : sets_) {
    if (std::ranges::equal(set.members, ranks)) return id;
  }
  return std::nullopt;
}

const ProcessSets::Set& ProcessSets::find(ProcessSetId id) const {
  if (const auto found = sets_.find(id); found != sets_.end()) return found->second;
  const auto found = removed_.find(id);
  if (found == removed_.end()) {
    throw Failure(ErrorCode::kInternal,
                  "process set " + std::to_string(id) + " is unknown, or was removed");
  }
  return found->second;
}

std::optional<int> ProcessSets::position(ProcessSetId id, int world_rank) const {
  const auto found = sets_.find(id);
  if (found == sets_.end()) return std::nullopt;
  return position_in(found->second.members, world_rank);
}

std::vector<ProcessSetId> ProcessSets::ids() const {
  std::vector<ProcessSetId> ids;
  ids.reserve(sets_.size());
  for (const auto& [id, set] : sets_) ids.push_back(id);
  return ids;
}

Subtree::Subtree(const ProcessSets& sets, std::vector<int> ranks)
    : sets_(&sets), ranks_(std::move(ranks)), world_(mask_of(kWorld)) {}

const MemberMask& Subtree::members(ProcessSetId id) const {
  if (id == kWorld) return world_;
  const auto found = others_.find(id);
  if (found != others_.end()) return found->second;
  const MemberMask& mask = others_.emplace(id, mask_of(id)).first->second;
  // More than there can be sets: the oldest has gone, and would be made again.
  if (others_.size() > 2 * kProcessSetsMax) {
    const auto oldest = others_.begin();
    others_.erase(oldest->first == id ? std::next(oldest) : oldest);
  }
  return mask;
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
