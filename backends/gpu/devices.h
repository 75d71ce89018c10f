// GPUs as the queue sees them. A rank works on one, the first that it hands in a tensor of.
#pragma once

#include <memory>

#include "control/device.h"
#include "gpu/driver.h"
#include "observe/lock_order.h"

namespace polyhvd::gpu {

// To make one costs nothing: the driver is not looked for before a GPU is named.
class Devices final : public polyhvd::Devices {
 public:
  // `local_rank` is the rank's number on its host.
  Devices(std::shared_ptr<Driver> driver, int local_rank)
      : driver_(std::move(driver)), local_rank_(local_rank) {}

  DeviceEventPtr record(Device device, Stream stream) override {
    return context(device)->record(stream);
  }
  DeviceEventPtr borrow(Device device, RawEvent event) override {
    return context(device)->borrow(event);
  }
  std::shared_ptr<std::byte> allocate(Device device, std::size_t bytes) override {
    return context(device)->allocate(bytes);
  }
  void copy_in(Device device, std::byte* to, const std::byte* from, std::size_t bytes) override;
  Device own(DeviceKind kind) override;

  // Of this rank's GPU. Throws kInvalidArgument for another one.
  ContextPtr context(Device device);

 private:
  const std::shared_ptr<Driver> driver_;
  const int local_rank_;
  OrderedMutex<LockRank::gpu_devices> mutex_;
  ContextPtr context_;  // guarded by mutex_; null before the first use
};

}  // namespace polyhvd::gpu
