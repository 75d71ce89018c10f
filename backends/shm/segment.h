// The memory that the ranks of one host share: liveness words, control rings
// and staging areas. A sealed memfd: nothing is left after a kill -9.
// No rank waits for a lock here, so a rank that dies at any point blocks no other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "control/error.h"

namespace polyhvd::shm {

inline constexpr std::size_t kCacheLine = 64;
inline constexpr std::size_t kRingBytes = 32 << 10;
// Steps of a collective that may be in flight between two ranks.
inline constexpr int kSlots = 4;
// Bytes that one rank stages for one other in one step, at most: stays in L2.
inline constexpr std::size_t kChunkBytesMax = 128 << 10;
// Bytes of one staging area at most, up to 256 ranks; beyond, chunks stay at a
// cache line.
inline constexpr std::size_t kStagingBytesMax = 16 << 20;

struct alignas(kCacheLine) Counter {
  std::atomic<std::uint64_t> value;
};

// Bytes from one writer to one reader. Positions only grow.
struct Ring {
  Counter written;
  Counter read;
  std::byte data[kRingBytes];
};

// The staging area of one process set, as member `m` of `size` on this host
// sees it. Every member owns kSlots regions of size * chunk_bytes; step s of the
// communicator's life uses region s % kSlots.
struct Staging {
  Counter* begun = nullptr;    // begun[m]: steps that m has started, its data in place
  Counter* reduced = nullptr;  // reduced[m]: steps whose own slice m has reduced
  Counter* writing = nullptr;  // writing[m]: 1 while m may write into other members' memory
  Counter* closed = nullptr;   // closed[m]: steps in which no rank may write into m's any more
  Counter* notes = nullptr;    // what m publishes at the beginning of a step; see note()
  std::byte* base = nullptr;
  int size = 0;
  std::size_t chunk_bytes = 0;

  std::size_t region_bytes() const noexcept { return chunk_bytes * static_cast<std::size_t>(size); }
  std::byte* region(int member, std::uint64_t step) const noexcept {
    return base + (static_cast<std::size_t>(member) * kSlots + step % kSlots) * region_bytes();
  }
  // Written before m begins the step, and read once it has. Relaxed: `begun` orders it.
  std::atomic<std::uint64_t>& note(int member, std::uint64_t step) const noexcept {
    return notes[static_cast<std::uint64_t>(member) * kSlots + step % kSlots].value;
  }
  // What `from` stages for `to`; the part for itself holds its reduced slice.
  std::byte* part(int from, int to, std::uint64_t step) const noexcept {
    return region(from, step) + static_cast<std::size_t>(to) * chunk_bytes;
  }
};

// Chunk for `size` ranks on one host: kSlots * size^2 chunks fit kStagingBytesMax.
std::size_t chunk_bytes(int size) noexcept;

class Segment {
 public:
  // Bytes for a host of `local_size` ranks and kProcessSetsMax process sets. Pages
  // that are never touched take no memory.
  static std::size_t bytes(int local_size) noexcept;

  // Maps `fd`, which stays the caller's. Throws Failure when it is too small.
  Segment(int fd, int local_size);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  int local_size() const noexcept { return local_size_; }

  std::atomic<std::uint32_t>& sleep_flag(int local) const noexcept;
  // Set before a rank closes its sockets in good order.
  std::atomic<std::uint32_t>& departed_flag(int local) const noexcept;

  // Held by the rank as long as its process lives; see DeathWatch.
  std::atomic<std::uint32_t>& life(int local) const noexcept;

  // Of process sets, that the rank has executed.
  std::atomic<std::uint64_t>& removals(int local) const noexcept;

  // The first reason wins. abort_reason() is empty while the host is healthy.
  void set_abort(const Error& error) noexcept;
  bool aborted() const noexcept;
  std::optional<Error> abort_reason() const;

  Ring& ring_to_leader(int local) const noexcept;
  Ring& ring_from_leader(int local) const noexcept;

  // Staging of the process set at place `index` (0: the world's), of which `members_here` ranks
  // live on this host.
  Staging staging(int index, int members_here) const noexcept;

 private:
  std::byte* base_ = nullptr;
  std::size_t bytes_ = 0;
  int local_size_;
};

}  // namespace polyhvd::shm
