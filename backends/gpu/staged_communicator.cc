#include "gpu/staged_communicator.h"

#include <algorithm>
#include <vector>

#include "engine/segments.h"
#include "gpu/staged_backend.h"

namespace polyhvd::gpu {
namespace {

constexpr std::size_t kCacheLine = 64;  // a whole number of elements of any type

// A run of bytes, cut into pieces of one size but for the last: what one round moves.
struct Pieces {
  std::size_t total;
  std::size_t piece;
  std::size_t count() const { return (total + piece - 1) / piece; }
  std::size_t begin(std::size_t round) const { return std::min(total, round * piece); }
  std::size_t size(std::size_t round) const { return begin(round + 1) - begin(round); }
};

// Walks segments as one run of bytes.
class Walk {
 public:
  explicit Walk(Segments segments, std::size_t at = 0) : segments_(segments) {
    take(at, [](std::byte*, std::size_t, std::size_t) {});
  }
  // Calls use(data, offset, bytes) for the pieces of the next `bytes`, which lie one after the
  // other; `offset` counts from the present position.
  template <class Use>
  void take(std::size_t bytes, Use&& use) {
    for (std::size_t done = 0; done < bytes;) {
      const Segment& segment = segments_[index_];
      const std::size_t count = std::min(bytes - done, segment.bytes - offset_);
      if (count > 0) use(segment.data + offset_, done, count);
      done += count;
      offset_ += count;
      if (offset_ < segment.bytes) continue;
      ++index_;
      offset_ = 0;
    }
  }

 private:
  Segments segments_;
  std::size_t index_ = 0;
  std::size_t offset_ = 0;
};

// Gives `staging` copies of the next `bytes` of the segments into a slot's memory, and back.
void fetch(Staging& staging, Walk& from, std::size_t bytes, std::byte* to) {
  from.take(bytes, [&](const std::byte* data, std::size_t at, std::size_t count) {
    staging.copy_to_host(to + at, data, count);
  });
}
void deliver(Staging& staging, Walk& to, std::size_t bytes, const std::byte* from) {
  to.take(bytes, [&](std::byte* data, std::size_t at, std::size_t count) {
    staging.copy_to_device(data, from + at, count);
  });
}

}  // namespace

// Of `parts` that share a slot.
std::size_t StagedCommunicator::part_bytes(std::size_t parts) const noexcept {
  return std::max(staging_.slot_bytes() / parts / kCacheLine * kCacheLine, kCacheLine);
}

void StagedCommunicator::allreduce(Segments in, Segments out, DType dtype, ReduceOp op, Scale scale,
                                   Deadline deadline) {
  const std::size_t total = total_bytes(in);
  if (total == 0) return;
  const bool is_whole = op == ReduceOp::kAdasum;
  const Pieces pieces{total, is_whole ? total : part_bytes(1)};
  Walk inputs(in);
  Walk outputs(out);
  staging_.run(
      pieces.count(), pieces.piece, deadline,
      [&](std::size_t round, std::byte* memory) {
        fetch(staging_, inputs, pieces.size(round), memory);
      },
      [&](std::size_t round, std::byte* memory) {
        std::vector<Segment> staged;
        if (is_whole) {  // cut as the tensors are
          for (const Segment& segment : in) {
            staged.push_back({memory, segment.bytes});
            memory += segment.bytes;
          }
        } else {
          staged.push_back({memory, pieces.size(round)});
        }
        on_cpu_.allreduce(staged, staged, dtype, op, scale, deadline);
      },
      [&](std::size_t round, std::byte* memory) {
        deliver(staging_, outputs, pieces.size(round), memory);
      });
}

void StagedCommunicator::broadcast(Segments in, Segments out, int root, Deadline deadline) {
  const bool is_root = static_cast<std::size_t>(root) == self_;
  const auto same_place = [](const Segment& a, const Segment& b) { return a.data == b.data; };
  const bool receives = !is_root || !std::ranges::equal(in, out, same_place);
  const Pieces pieces{total_bytes(out), part_bytes(1)};
  Walk inputs(in);
  Walk outputs(out);
  staging_.run(
      pieces.count(), pieces.piece, deadline,
      [&](std::size_t round, std::byte* memory) {
        if (is_root) fetch(staging_, inputs, pieces.size(round), memory);
      },
      [&](std::size_t round, std::byte* memory) {
        const Segment piece{memory, pieces.size(round)};
        on_cpu_.broadcast({&piece, 1}, {&piece, 1}, root, deadline);
      },
      [&](std::size_t round, std::byte* memory) {
        if (receives) deliver(staging_, outputs, pieces.size(round), memory);
      });
}

void StagedCommunicator::allgather(Segments in, Segments out, Counts counts, Deadline deadline) {
  Walk inputs(in);
  std::vector<Walk> outputs;  // of each member
  for (std::size_t m = 0; m < members_; ++m) {
    outputs.emplace_back(out.subspan(m * in.size(), in.size()));
  }
  const std::size_t piece = part_bytes(members_);
  const auto part = [&](std::size_t member) { return Pieces{counts[member], piece}; };
  std::vector<std::size_t> in_round(members_);
  const auto offset_of = [&](std::size_t member) {
    std::size_t offset = 0;
    for (std::size_t m = 0; m < member; ++m) offset += in_round[m];
    return offset;
  };
  const auto count = [&](std::size_t round) {
    for (std::size_t m = 0; m < members_; ++m) in_round[m] = part(m).size(round);
  };
  staging_.run(
      Pieces{*std::ranges::max_element(counts), piece}.count(), piece * members_, deadline,
      [&](std::size_t round, std::byte* memory) {
        count(round);
        fetch(staging_, inputs, in_round[self_], memory + offset_of(self_));
      },
      [&](std::size_t round, std::byte* memory) {
        count(round);
        const Bytes all(memory, offset_of(members_));
        on_cpu_.allgather(all.subspan(offset_of(self_), in_round[self_]), all, in_round, deadline);
      },
      [&](std::size_t round, std::byte* memory) {
        count(round);
        for (std::size_t m = 0; m < members_; ++m) {
          deliver(staging_, outputs[m], in_round[m], memory + offset_of(m));
        }
      });
}

void StagedCommunicator::reducescatter(Segments in, Segments out, Counts counts, DType dtype,
                                       ReduceOp op, Scale scale, Deadline deadline) {
  const std::size_t piece = part_bytes(members_ + 1);  // everybody's, and the result
  const auto part = [&](std::size_t member) { return Pieces{counts[member], piece}; };
  std::vector<Walk> inputs;
  std::size_t first = 0;
  for (const std::size_t bytes : counts) {
    inputs.emplace_back(in, first);
    first += bytes;
  }
  Walk outputs(out);
  staging_.run(
      Pieces{*std::ranges::max_element(counts), piece}.count(), piece * (members_ + 1), deadline,
      [&](std::size_t round, std::byte* memory) {
        for (std::size_t m = 0; m < members_; ++m) {
          fetch(staging_, inputs[m], part(m).size(round), memory + m * piece);
        }
      },
      [&](std::size_t round, std::byte* memory) {
        std::vector<Segment> staged;
        std::vector<std::size_t> in_round;
        for (std::size_t m = 0; m < members_; ++m) {
          in_round.push_back(part(m).size(round));
          staged.push_back({memory + m * piece, in_round.back()});
        }
        const Segment result{memory + members_ * piece, in_round[self_]};
        on_cpu_.reducescatter(staged, {&result, 1}, in_round, dtype, op, scale, deadline);
      },
      [&](std::size_t round, std::byte* memory) {
        deliver(staging_, outputs, part(self_).size(round), memory + members_ * piece);
      });
}

void StagedCommunicator::alltoall(ConstBytes in, Bytes out, Counts counts, Deadline deadline) {
  const std::size_t piece = part_bytes(2 * members_);
  const std::size_t received = members_ * piece;  // where in a slot it begins
  const auto part = [&](std::size_t from, std::size_t to) {
    return Pieces{counts[from * members_ + to], piece};
  };
  // Moves, for each member, the round's piece of its part between its places here and there.
  const auto for_each = [&](std::size_t round, const auto& part_with, auto&& move) {
    std::size_t staged = 0;
    std::size_t block = 0;
    for (std::size_t m = 0; m < members_; ++m) {
      const Pieces pieces = part_with(m);
      move(staged, block + pieces.begin(round), pieces.size(round));
      staged += pieces.size(round);
      block += pieces.total;
    }
    return staged;
  };
  const auto sent_to = [&](std::size_t m) { return part(self_, m); };
  const auto got_from = [&](std::size_t m) { return part(m, self_); };
  const auto nothing = [](std::size_t, std::size_t, std::size_t) {};
  staging_.run(
      Pieces{*std::ranges::max_element(counts), piece}.count(), 2 * received, deadline,
      [&](std::size_t round, std::byte* memory) {
        for_each(round, sent_to, [&](std::size_t staged, std::size_t at, std::size_t bytes) {
          staging_.copy_to_host(memory + staged, in.data() + at, bytes);
        });
      },
      [&](std::size_t round, std::byte* memory) {
        std::vector<std::size_t> in_round;
        for (std::size_t i = 0; i < counts.size(); ++i) {
          in_round.push_back(Pieces{counts[i], piece}.size(round));
        }
        on_cpu_.alltoall({memory, for_each(round, sent_to, nothing)},
                         {memory + received, for_each(round, got_from, nothing)}, in_round,
                         deadline);
      },
      [&](std::size_t round, std::byte* memory) {
        for_each(round, got_from, [&](std::size_t staged, std::size_t at, std::size_t bytes) {
          staging_.copy_to_device(out.data() + at, memory + received + staged, bytes);
        });
      });
}

std::unique_ptr<Communicator> StagedBackend::connect(ProcessSetId, const Place&,
                                                     std::span<const int> members,
                                                     Communicator* on_cpu) {
  const auto position = std::ranges::find(members, rank_) - members.begin();
  return std::make_unique<StagedCommunicator>(*staging_, *on_cpu,
                                              static_cast<std::size_t>(position), members.size());
}

}  // namespace polyhvd::gpu
