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

#include "host/host_backend.h"
#include "host/local_group.h"
#include "host/slices.h"

namespace polyhvd::host {

// On their way between hosts at a time.
inline constexpr std::size_t kChunksAhead = 4;

// Below, more time goes into steps than into bytes.
inline constexpr std::uint32_t kChunkBytesMin = 4 << 10;

class HostCommunicator final : public Communicator {
 public:
  HostCommunicator(Fabric& fabric, ProcessSetId set, std::span<const int> members);

  void allreduce(Segments in, Segments out, DType dtype, ReduceOp op, Scale scale,
                 Deadline deadline) override;
  void allgather(ConstBytes in, Bytes out, Counts counts, Deadline deadline) override;
  void broadcast(Segments in, Segments out, int root, Deadline deadline) override;
  void reducescatter(Segments in, Segments out, Counts counts, DType dtype, ReduceOp op,
                     Scale scale, Deadline deadline) override;
  void alltoall(ConstBytes in, Bytes out, Counts counts, Deadline deadline) override;

 private:
  struct Reduction {
    Segments in;
    Segments out;
    DType dtype;
    ReduceOp op;
    Scale scale;
    Deadline deadline;
    std::size_t bytes;
  };

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
  void reduce_ahead(const Reduction& r);
  void send_ahead(const Reduction& r, Cursor& reading, std::size_t bytes,
                  std::vector<std::byte>& partial);
  void gather_across(Bytes out, Counts counts, Deadline deadline);
  void scatter_here(const Reduction& r, Segments own, Counts counts);
  void reduce_terms(const Reduction& r, ConstBytes terms, Cursor own, std::size_t bytes);
  ConstBytes collect_terms(ConstBytes in, Counts counts, Deadline deadline);
  void alltoall_here(ConstBytes in, Bytes out, Counts counts, Deadline deadline);
  void alltoall_across(ConstBytes in, Bytes out, Counts counts, Deadline deadline);

  int hosts() const noexcept { return static_cast<int>(sides_.size()); }
  bool leads() const noexcept { return group_.self() == 0; }
  std::size_t tuned_chunk_bytes() const noexcept {
    return std::min<std::size_t>(chunk_bytes_,
                                 std::max(fabric_.tuning.chunk_bytes, kChunkBytesMin));
  }
  int rank_at(int position) const { return members_[static_cast<std::size_t>(position)]; }

  Fabric& fabric_;
  std::vector<int> members_;             // world ranks by position
  std::vector<std::vector<int>> sides_;  // positions on each host, hosts in order
  int position_ = 0;                     // of this rank
  int side_ = 0;                         // this rank's host
  int rails_ = 1;                        // slices: as many owners as the smallest host has
  std::size_t chunk_bytes_ = 0;
  LocalGroup group_;
  std::vector<std::vector<std::byte>> partials_;            // by host; scratch of the owner
  std::array<std::vector<std::byte>, kChunksAhead> ahead_;  // scratch: sums that are being sent
  std::vector<const std::byte*> sources_;                   // scratch
  std::vector<std::byte> flat_;     // scratch: an operation's bytes in one piece
  std::vector<std::byte> terms_;    // scratch: everybody's share of this rank's part
  std::vector<std::byte> vectors_;  // scratch: the same, as Adasum adds them
};

}  // namespace polyhvd::host
