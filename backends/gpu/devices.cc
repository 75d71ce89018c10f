#include "gpu/devices.h"

#include "control/error.h"

namespace polyhvd::gpu {

ContextPtr Devices::context(Device device) {
  const std::lock_guard lock(mutex_);
  if (!context_) context_ = Context::open(driver_, device.index);
  if (context_->device() == device.index) return context_;
  const std::string first = std::to_string(context_->device());
  throw Failure(ErrorCode::kInvalidArgument,
                "rank " + std::to_string(driver_->rank()) + " has used GPU " + first +
                    " since its first operation, but this tensor is on GPU " +
                    std::to_string(device.index) +
                    "; select one GPU for each rank before its first use: with PyTorch, "
                    "torch.cuda.set_device(hvd.local_rank())");
}

// What is not pinned is copied by way of memory of the driver's, so that only the stream knows
// when it has arrived.
void Devices::copy_in(Device device, std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes == 0) return;
  const OwnStream stream(context(device));
  stream.copy_to_device(to, from, bytes);
  stream.drain();
}

Device Devices::own(DeviceKind kind) {
  {
    const std::lock_guard lock(mutex_);
    if (context_) return {kind, context_->device()};
  }
  const int count = driver_->device_count();
  return {kind, count == 0 ? 0 : local_rank_ % count};
}

}  // namespace polyhvd::gpu
