// Collectives of one process set on GPUs. Each rank announces at the first one what it has, and all
// of them decide the same: NCCL connects them, or everything is staged. After that a call gives
// work to a stream and returns.
//
// How NCCL associates the terms of a sum is its own affair, and factors are applied before it,
// rounded to the tensor's type: bits may differ from the host backend's. What must not, or what
// NCCL has no notion of, is staged: in reproducible mode every reduction is.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "nccl/gpu_stream_group.h"
#include "nccl/hierarchy.h"
#include "nccl/nccl_backend.h"
#include "nccl/offer.h"

namespace polyhvd::nccl {

// So many small tensors travel as one.
inline constexpr std::size_t kPackedSegmentsMin = 3;

class NcclCommunicator final : public Communicator {
 public:
  NcclCommunicator(Resources& resources, ProcessSetId set, std::span<const int> members,
                   Communicator& on_cpu, std::unique_ptr<Communicator> staged,
                   std::unique_ptr<Hierarchy> hierarchy);

  void allreduce(Segments in, Segments out, DType dtype, ReduceOp op, Scale scale,
                 Deadline deadline) override;
  using Communicator::allgather;
  void allgather(Segments in, Segments out, Counts counts, Deadline deadline) override;
  void broadcast(Segments in, Segments out, int root, Deadline deadline) override;
  void reducescatter(Segments in, Segments out, Counts counts, DType dtype, ReduceOp op,
                     Scale scale, Deadline deadline) override;
  void alltoall(ConstBytes in, Bytes out, Counts counts, Deadline deadline) override;

  void begin(Device device, std::span<const DeviceEventPtr> ready, Deadline deadline) override;
  DeviceEventPtr end() override;
  void check() override;
  void finish() noexcept override;
  bool is_working() noexcept override;
  void abort() noexcept override;

 private:
  bool serves(Deadline deadline);
  bool takes_streams(Deadline deadline);
  bool decide(Deadline deadline);
  std::unique_ptr<GpuStreamGroup> connect(std::span<const int> ranks, Deadline deadline);
  Offer offer() const;
  Communicator& staged();
  std::optional<LibraryReduction> reduction_by_nccl(DType dtype, ReduceOp op, Scale scale) const;
  void allreduce_packed(Segments in, Segments out, DType dtype, const LibraryReduction& reduction,
                        RedOp op, Deadline deadline);
  void reducescatter_packed(Segments in, Segments out, Counts counts, std::size_t item,
                            const LibraryReduction& reduction, RedOp op, Deadline deadline);
  void gather_one(const Segment& in, Segments parts) const;
  void allgather_packed(Segments in, Segments out, Deadline deadline);
  static std::vector<Segment> picked(Segments all, std::size_t tensors,
                                     std::span<const std::size_t> which);
  void send_and_receive(int peer, ConstBytes out, Bytes in) const;
  void allreduce_by_levels(Segments in, Segments out, DType dtype, ReduceOp op,
                           const LibraryReduction& reduction, Deadline deadline);
  std::string label(std::span<const int> ranks) const;
  std::string member(std::size_t position) const;

  Resources& resources_;
  const ProcessSetId set_;
  const std::vector<int> members_;
  const std::size_t size_;
  std::size_t self_ = 0;
  Communicator& on_cpu_;
  std::unique_ptr<Communicator> staged_;
  std::unique_ptr<Hierarchy> hierarchy_;  // null where NCCL connects hosts, too
  std::optional<bool> serves_;            // nothing before the first operation
  // Null until they are used.
  std::unique_ptr<GpuStreamGroup> streams_;       // of all members
  std::unique_ptr<GpuStreamGroup> streams_here_;  // of those on this host

  // Of the batch that is being begun.
  Device device_;
  std::vector<DeviceEventPtr> ready_;
  Deadline deadline_{};
  GpuStreamGroup::Clock::duration patience_{};
  bool is_staged_ = false;
};

}  // namespace polyhvd::nccl
