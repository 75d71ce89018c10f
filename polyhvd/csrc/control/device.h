// Devices other than CPUs, as the queue needs them: their memory, and the order of what
// their streams do. One implementation for a kind of device (backends/gpu); nothing here
// or above knows a driver.
#pragma once

#include <cstddef>
#include <memory>

#include "control/types.h"

namespace polyhvd {

// A stream as the device's own library names it (CUDA: CUstream); null is the default one.
using Stream = void*;

// An event as the device's own library names it (CUDA: CUevent), recorded already.
using RawEvent = void*;

// A point in what a stream was given.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  // Whether the device has got there. Throws Failure when the device has failed.
  virtual bool reached() const = 0;
  // What `stream` is given from now on begins after this point. Does not wait.
  virtual void hold(Stream stream) const = 0;
};
using DeviceEventPtr = std::shared_ptr<const DeviceEvent>;

// Any thread may call these, and all of them throw Failure: kInvalidArgument where there is no
// such device, or no driver, with the reason; kInternal with the driver's words otherwise.
class Devices {
 public:
  virtual ~Devices() = default;
  // After everything that the stream was given up to now.
  virtual DeviceEventPtr record(Device device, Stream stream) = 0;
  // Of an event that another library has recorded, and does not change while it is queried.
  virtual DeviceEventPtr borrow(Device device, RawEvent event) = 0;
  // Returned when the last owner lets go of it, whatever the device still does with it.
  virtual std::shared_ptr<std::byte> allocate(Device device, std::size_t bytes) = 0;
  // Done when it returns, and seen by what any stream is given afterwards.
  virtual void copy_in(Device device, std::byte* to, const std::byte* from, std::size_t bytes) = 0;
  // The device of a rank that has joined, and has no tensors: the one that it used
  // last, or else one for each rank on a host.
  virtual Device own(DeviceKind kind) = 0;
};

}  // namespace polyhvd
