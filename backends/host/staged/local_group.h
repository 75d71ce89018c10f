// The members of a process set on this host, stepping together through their
// staging area. A step: each rank puts bytes into its region, announces them, and reads
// the others' regions.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <vector>

#include "engine/backend.h"
#include "host/cursor.h"
#include "host/host_backend.h"
#include "host/staged/staging_writer.h"
#include "shm/segment.h"

namespace polyhvd::host {

class LocalGroup {
 public:
  // `locals`: positions within the domain of the set's members on this host, in
  // rank order; `self` indexes it. A group of one has no staging area. Steps of each turn of the
  // staging area's place are larger than those of the turns before, so that what these have left
  // there counts as old.
  LocalGroup(Resources& resources, shm::Staging staging, const Place& place,
             std::vector<int> locals, int self);

  int size() const noexcept { return static_cast<int>(locals_.size()); }
  int self() const noexcept { return self_; }
  const shm::Staging& staging() const noexcept { return staging_; }

  // For everything that goes into this member's regions.
  StagingWriter& writer() noexcept { return writer_; }

  // Number of the step that comes next; the same on all members.
  std::uint64_t step() const noexcept { return step_; }
  void advance() noexcept { ++step_; }

  // Returns when every member is done with the region of the step `step`.
  void await_free(std::uint64_t step, Deadline deadline);
  // Says that this member's data of the step are in place / its slice is reduced.
  void publish_begun(std::uint64_t step, std::size_t bytes);
  void publish_reduced(std::uint64_t step);
  // Return when the other members have begun / `member` has reduced that step.
  void await_begun(std::uint64_t step, Deadline deadline);
  void await_begun_by(int member, std::uint64_t step, Deadline deadline);
  void await_reduced_by(int member, std::uint64_t step, Deadline deadline);

  // A word that the others read in the step; once it is free, before it is begun.
  void note(std::uint64_t step, std::uint64_t word) noexcept {
    staging_.note(self_, step).store(word, std::memory_order_relaxed);
  }
  // Of the other member, which has begun the step.
  std::uint64_t note_of(int member, std::uint64_t step) const noexcept {
    return staging_.note(member, step).load(std::memory_order_relaxed);
  }

  // Runs write(), which writes into the memory of `member`, unless that has closed it.
  template <class Write>
  void write_into(int member, std::uint64_t step, Write&& write) {
    std::atomic<std::uint64_t>& writing = staging_.writing[self_].value;
    // Sequentially consistent, as close(): one of the two sees the other's store.
    writing.store(1);
    if (staging_.closed[member].value.load() <= step) write();
    writing.store(0, std::memory_order_release);
  }
  // Returns when no rank writes into this member's memory any more in this step. `is_gone(m)`
  // returns whether m has ended. The wait for a rank that is suspended in write_into() has a
  // limit: most probably it has written, and it is not known when it continues.
  template <class IsGone>
  void close(std::uint64_t step, IsGone&& is_gone) {
    constexpr auto kPatience = std::chrono::seconds(1);
    staging_.closed[self_].value.store(step + 1);
    for (int m = 0; m < size(); ++m) {
      const auto writes = [&] { return m != self_ && staging_.writing[m].value.load() != 0; };
      for (const auto end = Parking::Clock::now() + kPatience;
           writes() && !is_gone(m) && Parking::Clock::now() < end;) {
        sched_yield();
      }
    }
  }

  // Member m's bytes[m] bytes go to every other member: `source` is read for
  // this one's, sinks[m] written for the others'.
  void spread(std::span<const std::size_t> bytes, Cursor source, std::span<Cursor> sinks,
              Deadline deadline);

 private:
  // Returns when no rank reads any more what the set before has left in the staging area.
  void take_over(Deadline deadline);
  [[noreturn]] void fail_late(int rank) const;
  int world_rank(int local) const;
  void await_counter(const shm::Counter* counters, int member, std::uint64_t value,
                     Deadline deadline);
  void wake_others();

  Resources& resources_;
  shm::Staging staging_;
  StagingWriter writer_;
  std::vector<int> locals_;
  std::vector<int> ranks_;  // of the members in the world
  int self_;
  std::uint64_t removals_;  // that all ranks of this host have executed before the first step
  std::uint64_t first_;     // step
  std::uint64_t step_;
};

}  // namespace polyhvd::host
