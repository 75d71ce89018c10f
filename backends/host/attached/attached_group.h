// Reductions of the ranks of one host, each of which reads its slice of the others' tensors in
// their memory and writes the sums there: one copy where the segment takes two. Which way is
// faster depends on the machine, so both are weighed, and all ranks come to the same choice.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "host/attached/peer_memory.h"
#include "host/cost_choice.h"
#include "host/host_backend.h"
#include "host/reduction.h"
#include "host/staged/local_group.h"
#include "observe/ticks.h"

namespace polyhvd::host {

// How tensors get from one rank of a host to another: through the segment, in two copies, or
// from memory to memory, in one.
enum class Way : std::uint8_t { kStaged = 0, kAttached = 1 };

// A reduction goes: if (considers()) { begin(); reduce(), or through the segment; end(). }
class AttachedGroup {
 public:
  // Below, system calls cost more than a second copy.
  static constexpr std::size_t kBytesMin = 32 << 10;

  // `ranks` are the group's members by their world ranks. Both others outlive this, which stays
  // where it is: the others read a word of it.
  AttachedGroup(Resources& resources, LocalGroup& group, std::vector<int> ranks)
      : resources_(resources), group_(group), ranks_(std::move(ranks)) {}
  AttachedGroup(const AttachedGroup&) = delete;
  AttachedGroup& operator=(const AttachedGroup&) = delete;

  // Whether it may go from memory to memory. The first one is where the ranks agree on whether
  // they can get at each other's memory, which takes a step of the group's.
  bool considers(const Reduction& r) {
    const Attaching how = attaching_ ? *attaching_ : agree(r.deadline);
    return how == Attaching::kAlways || (how == Attaching::kAuto && r.bytes >= kBytesMin);
  }
  Way begin(const Reduction& r);
  // False if it is not possible for one of them; then nothing has been reduced.
  bool reduce(const Reduction& r);
  void end();

  // Between begin() and end(): whether the time of this one is taken, without the time for which
  // this rank waits for the others to begin. It waits for that in meet() then.
  bool is_weighing() const noexcept { return now_.bytes > 0; }
  void meet(std::uint64_t step, Deadline deadline);

 private:
  // A quarter cheaper, or a training step, a fifth of which is communication, would not gain 5 %.
  static constexpr CostChoice<Way>::Habit kHabit{
      .advantage = 1.25F, .first_trial = 4, .trial_every = 256, .trials_in_row = 2};

  // Of a reduction, to decide which method is faster. The same on all ranks but for `ticks`.
  struct Weighed {
    std::size_t index = 0;  // into ways_
    Way way = Way::kStaged;
    std::size_t bytes = 0;  // 0: none
    Ticks ticks = 0;        // of this rank, waiting for the others to begin not included
  };

  // Another rank of this host and its tensors, cut as ours are, at other addresses.
  struct Neighbour {
    int member = 0;
    pid_t process = 0;
    iovec token{};  // of its token_
    std::vector<Segment> in;
    std::vector<Segment> out;
    std::vector<std::byte> terms;  // read from it
    std::vector<iovec> parts;      // scratch
  };

  Attaching agree(Deadline deadline);
  bool exchange_addresses(const Reduction& r);
  void weigh(std::uint64_t step);
  void reduce_own_slice(const Reduction& r, std::uint64_t step);
  std::size_t chunk_bytes() const noexcept;
  void read_terms(Neighbour& from, Cursor& at, std::size_t bytes, Deadline deadline);
  void write_sums(Neighbour& to, Cursor& at, std::size_t bytes, std::uint64_t step,
                  Deadline deadline);
  void check(int error, const Neighbour& with, Deadline deadline);
  int rank_of(int member) const { return ranks_[static_cast<std::size_t>(member)]; }

  Resources& resources_;
  LocalGroup& group_;
  const std::vector<int> ranks_;
  std::optional<Attaching> attaching_;  // empty: not agreed yet
  std::vector<Neighbour> neighbours_;
  std::vector<CostChoice<Way>> ways_;
  Weighed now_;                            // the reduction under way, if it is weighed
  Weighed before_;                         // the one before it
  std::uint64_t token_ = 0;                // that others read to see that they read this process
  std::vector<const std::byte*> sources_;  // scratch
  std::vector<iovec> sums_at_;             // likewise
};

}  // namespace polyhvd::host
