// Collectives of one process set on tensors of GPUs, by way of the CPUs: each is cut into rounds
// that fit into a slot of pinned memory, and a round is a collective of the CPUs.
//
// Same bits as on CPUs, since theirs do not depend on how an operation is cut. Adasum, which is
// defined on whole tensors, is one round.
#pragma once

#include "engine/backend.h"
#include "gpu/staging.h"

namespace polyhvd::gpu {

class StagedCommunicator final : public Communicator {
 public:
  // `on_cpu` has the same members, of which this rank is the one at `position`.
  StagedCommunicator(Staging& staging, Communicator& on_cpu, std::size_t position,
                     std::size_t members)
      : staging_(staging), on_cpu_(on_cpu), self_(position), members_(members) {}

  void allreduce(Segments in, Segments out, DType dtype, ReduceOp op, Scale scale,
                 Deadline deadline) override;
  using Communicator::allgather;
  void allgather(Segments in, Segments out, Counts counts, Deadline deadline) override;
  void broadcast(Segments in, Segments out, int root, Deadline deadline) override;
  void reducescatter(Segments in, Segments out, Counts counts, DType dtype, ReduceOp op,
                     Scale scale, Deadline deadline) override;
  void alltoall(ConstBytes in, Bytes out, Counts counts, Deadline deadline) override;

  void begin(Device device, std::span<const DeviceEventPtr> ready, Deadline) override {
    staging_.begin(device, ready);
  }
  DeviceEventPtr end() override { return staging_.end(); }
  void check() override { staging_.check(); }
  void abort() noexcept override { staging_.settle(); }

 private:
  std::size_t part_bytes(std::size_t parts) const noexcept;

  Staging& staging_;
  Communicator& on_cpu_;
  const std::size_t self_;
  const std::size_t members_;
};

}  // namespace polyhvd::gpu
