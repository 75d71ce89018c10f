// Which ranks form which process set. A value that is equal on every rank; it
// changes only by a decision that all ranks apply at the same place.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "control/types.h"

namespace polyhvd {

// Which members of one process set have reported, by position. Allocates once.
class MemberMask {
 public:
  explicit MemberMask(std::size_t member_count = 0) : words_((member_count + 63) / 64) {}

  // False when the position was in already; it must be below member_count.
  bool insert(std::size_t position) noexcept {
    const std::size_t index = position / 64;
    const std::uint64_t bit = std::uint64_t{1} << (position % 64);
    if (words_[index] & bit) return false;
    words_[index] |= bit;
    begin_ = std::min(begin_, index);
    end_ = std::max(end_, index + 1);
    ++count_;
    return true;
  }
  // False, with nothing changed, when a position of the other, equally long mask was in
  // already.
  bool merge(const MemberMask& other) noexcept {
    for (std::size_t i = other.begin_; i < other.end_; ++i) {
      if (words_[i] & other.words_[i]) return false;
    }
    for (std::size_t i = other.begin_; i < other.end_; ++i) words_[i] |= other.words_[i];
    begin_ = std::min(begin_, other.begin_);
    end_ = std::max(end_, other.end_);
    count_ += other.count_;
    return true;
  }
  bool contains(std::size_t position) const noexcept {
    return words_[position / 64] >> (position % 64) & 1;
  }
  void clear() noexcept {
    for (std::size_t i = begin_; i < end_; ++i) words_[i] = 0;
    begin_ = std::numeric_limits<std::size_t>::max();
    end_ = count_ = 0;
  }
  std::size_t count() const noexcept { return count_; }
  bool empty() const noexcept { return count_ == 0; }

 private:
  std::vector<std::uint64_t> words_;
  // Words outside of [begin_, end_) are zero: a mask of one rank costs one word.
  std::size_t begin_ = std::numeric_limits<std::size_t>::max();
  std::size_t end_ = 0;
  std::size_t count_ = 0;
};

// Position of a rank among sorted members, or nothing when it is none of them.
std::optional<int> position_in(std::span<const int> members, int world_rank) noexcept;

// Process sets at one time, the world included: shared memory has addresses for each.
inline constexpr std::size_t kProcessSetsMax = 1024;

// Where in the memory that ranks share a process set has its part. What is left there of the set
// that had the place before is told apart by the turn, and may still be read by ranks that have
// not come to the end of that set.
struct Place {
  std::size_t index = 0;
  std::uint64_t turn = 0;      // how many sets had the place before
  std::uint64_t removals = 0;  // of process sets, that a rank must have executed
};

class ProcessSets {
 public:
  // Set 0 is the world, ranks 0 to world_size - 1.
  explicit ProcessSets(int world_size);

  int world_size() const noexcept { return world_size_; }

  // Ranks are sorted and distinct, within the world, at least one, and there are fewer than
  // kProcessSetsMax sets. Throws Failure(kInvalidArgument) otherwise. Ids count up and are never
  // used again.
  ProcessSetId add(std::vector<int> ranks);
  // The id must be known, and not the world's. Its members stay readable for a while: what was
  // agreed before may still be running.
  void remove(ProcessSetId id);
  // This rank has executed the next removal: returns how many it has executed. Sets that were
  // removed kProcessSetsMax removals before are forgotten: a rank reports nothing of them any
  // more, as each removal takes a request of every rank.
  std::uint64_t settle_removal();
  // The set of exactly these ranks, if there is one.
  std::optional<ProcessSetId> find(std::span<const int> ranks) const noexcept;
  // How many were ever added, the world included.
  std::size_t added() const noexcept { return next_; }
  std::size_t size() const noexcept { return sets_.size(); }

  bool contains(ProcessSetId id) const noexcept { return sets_.contains(id); }
  // Sorted world ranks. The id must be known, or have been, see settle_removal(). The span stays
  // valid as long: a set never changes once it was added.
  std::span<const int> members(ProcessSetId id) const { return find(id).members; }
  const Place& place(ProcessSetId id) const { return find(id).place; }
  // Position of a world rank in the set, or nothing when it is not a member of it or
  // there is no such set.
  std::optional<int> position(ProcessSetId id, int world_rank) const;
  std::vector<ProcessSetId> ids() const;

 private:
  struct Set {
    std::vector<int> members;
    Place place;
  };

  const Set& find(ProcessSetId id) const;

  int world_size_;
  ProcessSetId next_ = 1;
  std::map<ProcessSetId, Set> sets_;
  std::map<ProcessSetId, Set> removed_;
  std::deque<ProcessSetId> removed_in_order_;
  std::uint64_t removals_ = 0;
  std::uint64_t settled_ = 0;  // of these
  std::deque<Place> free_;     // that had a set before
};

// The ranks at and below a node of the control tree. What one of its messages stands
// for is looked up in whole, so that its cost hardly grows with the ranks.
class Subtree {
 public:
  // `sets` must outlive this.
  Subtree(const ProcessSets& sets, std::vector<int> ranks);

  std::span<const int> ranks() const noexcept { return ranks_; }
  // Those of them that are in the set, by position. The id must be known, or have been.
  const MemberMask& members(ProcessSetId id) const;

 private:
  MemberMask mask_of(ProcessSetId id) const;

  const ProcessSets* sets_;
  std::vector<int> ranks_;
  MemberMask world_;
  mutable std::map<ProcessSetId, MemberMask> others_;  // as they are asked for, the newest
};

}  // namespace polyhvd
