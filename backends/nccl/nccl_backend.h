// The backend for tensors on GPUs that moves them with NCCL, on a separate stream and without
// waiting for the GPU. What NCCL cannot do in the same way goes through memory of the host, which
// another backend stages.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "engine/backend.h"
#include "engine/parking.h"
#include "gpu/devices.h"
#include "nccl/hierarchy.h"
#include "nccl/library.h"

namespace polyhvd::nccl {

struct Settings {
  std::vector<std::string> libraries;  // where NCCL may be, the likeliest first
  bool required = false;               // where it cannot serve, that is an error
  bool shares_gpus = false;            // NCCL_MULTI_RANK_GPU_ENABLE is set
  bool reproducible = false;           // sums are the host backend's
  bool hierarchical = false;           // sums are NCCL's within hosts, and the CPUs' between them
};

// What a rank's communicators share. Everything outlives them.
class Resources {
 public:
  Resources(int rank, Settings settings, std::shared_ptr<gpu::Devices> devices, Parking& parking,
            std::function<std::string(int rank)> name_of, std::function<int(int rank)> host_of,
            std::function<void(const std::string&)> log)
      : rank(rank),
        settings(std::move(settings)),
        parking(parking),
        name_of(std::move(name_of)),
        host_of(std::move(host_of)),
        log(std::move(log)),
        devices_(std::move(devices)) {}

  const int rank;
  const Settings settings;
  Parking& parking;
  const std::function<std::string(int rank)> name_of;
  const std::function<int(int rank)> host_of;
  const std::function<void(const std::string&)> log;

  gpu::Devices& devices() const noexcept { return *devices_; }
  // The same at every call. Throws Failure(kInvalidArgument) with the reasons when there is none.
  std::shared_ptr<const Library> library();
  // Of all process sets: were there several, kernels of two sets could wait for each other, as
  // only one stream has them in the order that all ranks share.
  std::shared_ptr<gpu::OwnStream> stream(const gpu::ContextPtr& context);
  // That NCCL does not serve: once, as it is so for every process set.
  void warn(const std::string& text);

  void count(std::size_t bytes) noexcept { bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  std::uint64_t bytes() const noexcept { return bytes_.load(std::memory_order_relaxed); }

 private:
  std::shared_ptr<gpu::Devices> devices_;
  std::shared_ptr<const Library> library_;  // null before the first use; the driver's
  std::shared_ptr<gpu::OwnStream> stream_;  // likewise
  bool warned_ = false;
  std::atomic<std::uint64_t> bytes_{0};  // that this rank gave to NCCL; any thread reads it
};

class NcclBackend final : public Backend {
 public:
  // `staged` serves what NCCL does not, `between_hosts` process sets that reduce by levels; both
  // outlive this.
  NcclBackend(Resources& resources, Backend& staged, Backend& between_hosts)
      : resources_(resources), staged_(staged), between_hosts_(between_hosts) {}
  std::string_view name() const noexcept override { return "nccl"; }
  bool supports(OpKind kind, DType dtype, ReduceOp op, DeviceKind device) const override {
    return device == DeviceKind::kCuda && staged_.supports(kind, dtype, op, device);
  }
  // Touches neither NCCL nor a GPU: the first operation does.
  std::unique_ptr<Communicator> connect(ProcessSetId set, const Place& place,
                                        std::span<const int> members,
                                        Communicator* on_cpu) override;

 private:
  std::unique_ptr<Hierarchy> hierarchy_of(ProcessSetId set, const Place& place,
                                          std::span<const int> members);

  Resources& resources_;
  Backend& staged_;
  Backend& between_hosts_;
};

}  // namespace polyhvd::nccl
