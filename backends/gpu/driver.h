// The CUDA driver that is found at run time, on the first use of a GPU, and what is owned of it:
// contexts, streams, events and memory. No header of CUDA is needed. Any thread may call.
//
// Errors are thrown as Failure with the driver's text, the call and the GPU: kInvalidArgument
// where there is no driver or no such GPU, and kInternal for the rest.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "control/device.h"
#include "observe/lock_order.h"

namespace polyhvd::gpu {

// As in cuda.h of CUDA 11 to 13: CUresult, CUdevice, CUdeviceptr, and the opaque handles.
using Code = int;
using Ordinal = int;
using Address = unsigned long long;
using Handle = void*;

// The functions of the driver, without the numbers of their versions.
struct Functions {
  Code (*Init)(unsigned flags);
  Code (*GetErrorName)(Code, const char** text);
  Code (*GetErrorString)(Code, const char** text);
  Code (*DeviceGetCount)(int* count);
  Code (*DeviceGet)(Ordinal*, int index);
  Code (*DeviceGetUuid)(char* sixteen_bytes, Ordinal);
  Code (*DevicePrimaryCtxRetain)(Handle* context, Ordinal);
  Code (*DevicePrimaryCtxRelease)(Ordinal);
  Code (*CtxPushCurrent)(Handle context);
  Code (*CtxPopCurrent)(Handle* context);
  Code (*CtxGetStreamPriorityRange)(int* least, int* greatest);
  Code (*MemAlloc)(Address*, std::size_t bytes);
  Code (*MemFree)(Address);
  Code (*MemHostAlloc)(void**, std::size_t bytes, unsigned flags);
  Code (*MemFreeHost)(void*);
  Code (*MemcpyDtoHAsync)(void* to, Address from, std::size_t bytes, Handle stream);
  Code (*MemcpyHtoDAsync)(Address to, const void* from, std::size_t bytes, Handle stream);
  Code (*MemcpyDtoDAsync)(Address to, Address from, std::size_t bytes, Handle stream);
  Code (*StreamCreateWithPriority)(Handle* stream, unsigned flags, int priority);
  Code (*StreamDestroy)(Handle stream);
  Code (*StreamSynchronize)(Handle stream);
  Code (*StreamWaitEvent)(Handle stream, Handle event, unsigned flags);
  Code (*EventCreate)(Handle* event, unsigned flags);
  Code (*EventRecord)(Handle event, Handle stream);
  Code (*EventQuery)(Handle event);
  Code (*EventDestroy)(Handle event);
};

// The library. To make one costs nothing.
class Driver {
 public:
  // `rank` is named in errors; `library` is a file name or a path.
  explicit Driver(int rank, std::string library = "libcuda.so.1")
      : rank_(rank), library_(std::move(library)) {}
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Loads it at the first call, and initialises it. It stays loaded for good.
  const Functions& functions();
  // Throws unless the call has succeeded; `device` is the GPU that was meant, or -1.
  void check(Code code, const char* call, int device) const;

  int rank() const noexcept { return rank_; }
  int device_count();
  // Tells GPUs apart, also between processes and hosts; as nvidia-smi writes it.
  std::string uuid_of(int device);

 private:
  void load();
  std::string words_for(Code code) const;

  const int rank_;
  const std::string library_;
  OrderedMutex<LockRank::gpu_driver> mutex_;
  std::atomic<bool> loaded_{false};
  Functions functions_{};  // written once under mutex_, before loaded_
};

// The context that everybody in the process uses for a GPU, frameworks included.
class Context : public std::enable_shared_from_this<Context> {
 public:
  // Throws kInvalidArgument where there is no such GPU.
  static std::shared_ptr<Context> open(std::shared_ptr<Driver> driver, int device);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Driver& driver() const noexcept { return *driver_; }
  const Functions& functions() const noexcept { return functions_; }
  int device() const noexcept { return device_; }
  Handle handle() const noexcept { return handle_; }
  void check(Code code, const char* call) const { driver_->check(code, call, device_); }

  // After all that the stream was given up to now.
  DeviceEventPtr record(Stream stream);
  // Recorded by another library, which does not change it while it is queried.
  DeviceEventPtr borrow(RawEvent event);
  // On the GPU. Null for no bytes. Its end waits for whatever the GPU is doing.
  std::shared_ptr<std::byte> allocate(std::size_t bytes);

 private:
  friend class Event;
  Context(std::shared_ptr<Driver> driver, int device, Ordinal ordinal, Handle handle);
  Handle take_event();

  std::shared_ptr<Driver> driver_;
  const Functions& functions_;
  const int device_;
  const Ordinal ordinal_;
  const Handle handle_;
  OrderedMutex<LockRank::gpu_events> mutex_;
  std::vector<Handle> free_events_;  // guarded by mutex_
};
using ContextPtr = std::shared_ptr<Context>;

// Makes a context the calling thread's current one for a while.
class Current {
 public:
  explicit Current(const Context& context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Functions& functions_;
};

// A stream of polyhvd's. It waits for no other one unless made to.
class OwnStream {
 public:
  // With the GPU's highest priority, or with the usual one.
  explicit OwnStream(ContextPtr context, bool urgent = false);
  ~OwnStream();
  OwnStream(const OwnStream&) = delete;
  OwnStream& operator=(const OwnStream&) = delete;

  Stream get() const noexcept { return handle_; }
  DeviceEventPtr record() const { return context_->record(handle_); }
  // Both only give the copy to the stream. Memory of the host has to be pinned.
  void copy_to_host(std::byte* to, const std::byte* from, std::size_t bytes) const;
  void copy_to_device(std::byte* to, const std::byte* from, std::size_t bytes) const;
  // Waits until all is done; for what no other rank has a part in.
  void drain() const;

 private:
  ContextPtr context_;
  Handle handle_ = nullptr;
};

// Memory of the host that the GPU can reach.
class PinnedMemory {
 public:
  PinnedMemory(ContextPtr context, std::size_t bytes);
  ~PinnedMemory();
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  // Leaves the memory to the end of the process: the GPU may still use it.
  void leave() noexcept { data_ = nullptr; }

 private:
  ContextPtr context_;
  std::byte* data_ = nullptr;
  const std::size_t bytes_;
};

}  // namespace polyhvd::gpu
