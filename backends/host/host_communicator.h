// Collectives of one process set on CPUs. Within a host through staging areas,
// straight from and to the tensors; between hosts by a Transport.
//
// Same bits: an element is the sum over hosts, in order, of the sums over each
// host's ranks, in order; in reproducible mode, and in a reducescatter, the sum over
// ranks in order. Slicing, chunking, fusion and timing do not enter.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "host/attached/attached_group.h"
#include "host/host_backend.h"
#include "host/reduction.h"
#include "host/slices.h"
#include "host/staged/local_group.h"

namespace polyhvd::host {

// Between hosts, in each direction.
inline constexpr std::size_t kChunksAhead = 4;

// Between hosts, to all others together.
inline constexpr std::size_t kSwappedBytesMax = 64 << 10;

class HostCommunicator final : public Communicator {
 public:
  HostCommunicator(Resources& resources, const Place& place, std::span<const int> members);

  void allreduce(Segments in, Segments out, DType dtype, ReduceOp op, Scale scale,
                 Deadline deadline) override;
  using Communicator::allgather;
  void allgather(Segments in, Segments out, Counts counts, Deadline deadline) override;
  void broadcast(Segments in, Segments out, int root, Deadline deadline) override;
  void reducescatter(Segments in, Segments out, Counts counts, DType dtype, ReduceOp op,
                     Scale scale, Deadline deadline) override;
  void alltoall(ConstBytes in, Bytes out, Counts counts, Deadline deadline) override;

 private:
  // Of an operation between hosts with one rank each.
  struct Chunk {
    Pieces pieces;
    std::vector<Cursor> at;  // where each host's piece begins
    std::vector<std::byte> memory;

    // Of a piece that does not lie in one.
    std::byte* place(std::size_t host) {
      if (memory.size() < pieces.total) memory.resize(pieces.total);
      return memory.data() + pieces.begin(host);
    }
  };

  void reduce_here(const Reduction& r);
  void reduce_staged(const Reduction& r);
  void reduce_alone(const Reduction& r);
  void reduce_direct(const Reduction& r);
  void reduce_sliced(const Reduction& r);
  void reduce_in_rank_order(const Reduction& r);
  void reduce_adasum(const Reduction& r);
  void add_adaptively_in_tree(const Reduction& r, std::size_t first, std::size_t count);
  void stage(const Reduction& r, const Slices& slices, std::size_t i, std::vector<Cursor>& cursors);
  void reduce_own_chunk(const Reduction& r, Cursor& mine, std::size_t bytes);
  void reduce_own_chunk_across(const Reduction& r, Cursor& mine, std::size_t bytes);
  void exchange_partials(std::size_t bytes, Deadline deadline);
  void spread_sums(const Reduction& r, Cursor& mine, std::size_t bytes);
  void swap_terms(const Reduction& r);
  void reduce_ahead(const Reduction& r);
  void send_terms(Chunk& chunk, Cursor& reading);
  void add_terms(const Reduction& r, Chunk& chunk);
  void take_sums(const Reduction& r, Chunk& chunk);
  void hand_on(Segments out, int root_side, Deadline deadline);
  void gather_across(Segments out, std::size_t parts, Counts counts, Deadline deadline);
  void swap_blocks(int to, Segments sent, int from, Segments received, Deadline deadline);
  void scatter_here(const Reduction& r, Segments own, Counts counts);
  void reduce_terms(const Reduction& r, ConstBytes terms, Cursor own, std::size_t bytes);
  ConstBytes collect_terms(ConstBytes in, Counts counts, Deadline deadline);
  void alltoall_here(ConstBytes in, Bytes out, Counts counts, Deadline deadline);
  void alltoall_across(ConstBytes in, Bytes out, Counts counts, Deadline deadline);

  int hosts() const noexcept { return static_cast<int>(sides_.size()); }
  // By the slice's or the host's number.
  static std::size_t index(int side) noexcept { return static_cast<std::size_t>(side); }
  int next_side(int k) const noexcept { return (side_ + k + hosts()) % hosts(); }
  int owner_on(int side) const {
    return rank_at(sides_[index(side)][static_cast<std::size_t>(group_.self())]);
  }
  // Whether a second message would cost more than sending it all to all other hosts.
  bool is_little(std::size_t bytes) const noexcept {
    return bytes * (sides_.size() - 1) <= kSwappedBytesMax;
  }
  bool leads() const noexcept { return group_.self() == 0; }
  // Between hosts a little less than a power of two: with what a message has beside its bytes it
  // then fills large segments, and none follows that has next to nothing, which TCP might hold
  // back.
  std::size_t tuned_chunk_bytes() const noexcept {
    const auto bytes = std::min<std::size_t>(
        chunk_bytes_, std::max(resources_.tuning.chunk_bytes, kChunkBytesMin));
    return hosts() > 1 ? bytes / 128 * 127 : bytes;
  }
  int rank_at(int position) const { return members_[static_cast<std::size_t>(position)]; }

  Resources& resources_;
  std::vector<int> members_;             // world ranks by position
  std::vector<std::vector<int>> sides_;  // positions on each host, hosts in order
  int position_ = 0;                     // of this rank
  int side_ = 0;                         // this rank's host
  int rails_ = 1;                        // slices: as many owners as the smallest host has
  std::size_t chunk_bytes_ = 0;
  LocalGroup group_;
  AttachedGroup attached_;                        // of the same ranks
  std::vector<std::vector<std::byte>> partials_;  // by host; scratch of the owner
  std::vector<std::byte> sums_;                   // likewise
  // Being sent, added, and received, and one more.
  std::array<Chunk, 2 * kChunksAhead + 1> ahead_;
  std::vector<const std::byte*> sources_;  // scratch
  std::vector<std::byte> flat_;            // scratch: an operation's bytes in one piece
  std::vector<std::byte> terms_;           // scratch: everybody's share of this rank's part
  std::vector<std::byte> vectors_;         // scratch: the same, as Adasum adds them
};

}  // namespace polyhvd::host
