// An allreduce in three steps, for jobs whose hosts are joined by less than what joins the GPUs
// of one: NCCL reduces within each host and leaves every rank a part; ranks in the same place on
// their hosts reduce their parts with each other, by CPUs; NCCL gathers the parts within each
// host. Each rank thus moves 1/n of the bytes between hosts that have n ranks. As
// HOROVOD_HIERARCHICAL_ALLREDUCE, see https://horovod.readthedocs.io.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "engine/backend.h"
#include "nccl/gpu_stream_group.h"
#include "nccl/reductions.h"

namespace polyhvd::nccl {

// Of a process set, as one of its ranks sees it; world ranks, ascending.
struct Levels {
  std::vector<int> here;    // on its host
  std::vector<int> across;  // in its place, one on each host
  std::size_t place = 0;    // its own in `here`
};

// Nothing unless several hosts have equally many of the members, and more than one. Pure.
std::optional<Levels> levels_of(std::span<const int> members, int rank,
                                const std::function<int(int rank)>& host_of);

class Hierarchy {
 public:
  // Both of the ranks `across`: `staged` takes tensors on GPUs, by way of `on_cpu`.
  Hierarchy(Levels levels, std::unique_ptr<Communicator> on_cpu,
            std::unique_ptr<Communicator> staged)
      : levels_(std::move(levels)), on_cpu_(std::move(on_cpu)), staged_(std::move(staged)) {}

  std::span<const int> here() const noexcept { return levels_.here; }
  // As Communicator's; `streams` connects the ranks on this host. Returns when this rank's part has
  // gone round the hosts.
  void allreduce(GpuStreamGroup& streams, Device device, Segments in, Segments out, DType dtype,
                 ReduceOp op, const LibraryReduction& reduction, Deadline deadline);
  void check() { staged_->check(); }
  void abort() noexcept { staged_->abort(); }

 private:
  struct Piece {  // whole elements for each rank here
    std::byte* in;
    std::byte* out;
    std::size_t bytes;
  };
  struct Step {
    Device device;
    DType dtype;
    ReduceOp op;
    DataType type;
    RedOp nccl_op;
    Deadline deadline;
  };
  void reduce(GpuStreamGroup& streams, std::span<const Piece> pieces, const Step& step);
  std::size_t ranks_here() const noexcept { return levels_.here.size(); }

  const Levels levels_;
  std::unique_ptr<Communicator> on_cpu_;
  std::unique_ptr<Communicator> staged_;
};

}  // namespace polyhvd::nccl
