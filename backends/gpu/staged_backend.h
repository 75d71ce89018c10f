// The backend for tensors on GPUs that needs no other library: they pass through pinned memory,
// and the CPUs do the rest.
#pragma once

#include <memory>
#include <utility>

#include "engine/backend.h"
#include "gpu/staging.h"

namespace polyhvd::gpu {

class StagedBackend final : public Backend {
 public:
  // Does on GPUs what `on_cpu`, which outlives it, does on CPUs.
  StagedBackend(int rank, std::shared_ptr<Staging> staging, const Backend& on_cpu)
      : rank_(rank), staging_(std::move(staging)), on_cpu_(on_cpu) {}
  std::string_view name() const noexcept override { return "staged"; }
  bool supports(OpKind kind, DType dtype, ReduceOp op, DeviceKind device) const override {
    return device == DeviceKind::kCuda && on_cpu_.supports(kind, dtype, op, DeviceKind::kCpu);
  }
  std::unique_ptr<Communicator> connect(ProcessSetId set, const Place& place,
                                        std::span<const int> members,
                                        Communicator* on_cpu) override;

 private:
  const int rank_;
  const std::shared_ptr<Staging> staging_;
  const Backend& on_cpu_;
};

}  // namespace polyhvd::gpu
