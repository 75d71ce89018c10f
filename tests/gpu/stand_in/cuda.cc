// A test double of the CUDA driver (libcuda.so.1) for machines without a GPU: the symbols that
// polyhvd uses, with the ABI of cuda.h of CUDA 11 to 13. Whatever a real driver would forgive
// by luck ends the process here, with the name of the call.
//
// Memory of a device: its address is reserved and cannot be touched by the CPU; streams reach
// the bytes through a second mapping, polyhvd_stand_in_open(). It begins as NaNs, and an
// address is never used twice. Streams: one thread each, and every task comes late by a random
// time, so that a wait that is missing gives wrong numbers. The legacy default stream is not
// ordered with others, as if all were non-blocking.
//
// POLYHVD_STAND_IN_CUDA_DEVICES  number of devices (2); 0: cuInit finds none
// POLYHVD_STAND_IN_CUDA_SEED     of the delays (1)
// POLYHVD_STAND_IN_CUDA_FAIL     CALL:N or CALL:N:CODE, the N-th call fails with CODE (700). All
//                                calls fail after 700, as on a device, and after no other code
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "machine.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace stand_in {
namespace {

// What every call begins with: whether it is to fail.
CUresult enter(const char* call, Lock& lock) {
  Driver& d = driver();
  lock = Lock(d.mutex);
  if (d.broken) return kIllegalAddress;
  const long count = ++d.calls[call];
  if (const char* wanted = std::getenv("POLYHVD_STAND_IN_CUDA_FAIL")) {
    const std::string begin = std::string(call) + ":" + std::to_string(count);
    if (begin == wanted || std::string(wanted).starts_with(begin + ":")) {
      const char* code = wanted + begin.size();
      const CUresult result = *code == ':' ? std::atoi(code + 1) : kIllegalAddress;
      d.broken = result == kIllegalAddress;
      return result;
    }
  }
  if (!d.initialized && std::strcmp(call, "cuInit") != 0) return kNotInitialized;
  return kSuccess;
}

}  // namespace

#define ENTER \
  Lock lock;  \
  if (const CUresult entered = enter(__func__, lock); entered != kSuccess) return entered

// The test double's own -----------------------------------------------------------------

// Runs `task` in its turn on the stream. It may block.
EXPORTED CUresult polyhvd_stand_in_enqueue(void* stream, void (*task)(void*), void* context) {
  const Lock lock(driver().mutex);
  give(*find_stream(__func__, stream), [task, context] { task(context); });
  return kSuccess;
}

EXPORTED int polyhvd_stand_in_is_device_memory(const void* data, std::size_t bytes) {
  const Lock lock(driver().mutex);
  std::size_t offset = 0;
  const Memory* memory = find_memory(reinterpret_cast<std::uintptr_t>(data), bytes, offset);
  return memory != nullptr && memory->device >= 0 ? 1 : 0;
}

// Where the CPU can read and write these bytes of a device: what a task on a stream does with
// memory goes through this. Ends the process unless they lie in one live allocation.
EXPORTED void* polyhvd_stand_in_open(const void* data, std::size_t bytes) {
  const Lock lock(driver().mutex);
  return view_of_device(__func__, reinterpret_cast<CUdeviceptr>(data), bytes);
}

// How often a call was made, for tests that ask what was not done.
EXPORTED long polyhvd_stand_in_calls(const char* call) {
  const Lock lock(driver().mutex);
  return driver().calls[call];
}

// Library and devices -------------------------------------------------------------------

EXPORTED CUresult cuInit(unsigned) {
  ENTER;
  Driver& d = driver();
  if (d.devices == 0) return kNoDevice;
  d.initialized = true;
  d.retained.resize(static_cast<std::size_t>(d.devices), 0);
  return kSuccess;
}

EXPORTED CUresult cuDriverGetVersion(int* version) {
  *version = 12040;
  return kSuccess;
}

namespace {
struct Words {
  CUresult code;
  const char* name;
  const char* text;
};
constexpr Words kWords[] = {
    {0, "CUDA_SUCCESS", "no error"},
    {1, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {2, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {101, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {600, "CUDA_ERROR_NOT_READY", "device not ready"},
    {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
};
CUresult word_of(CUresult code, const char** text, const char* Words::* word) {
  for (const Words& words : kWords) {
    if (words.code != code) continue;
    *text = words.*word;
    return kSuccess;
  }
  *text = nullptr;
  return kInvalidValue;
}
}  // namespace

EXPORTED CUresult cuGetErrorName(CUresult code, const char** text) {
  return word_of(code, text, &Words::name);
}
EXPORTED CUresult cuGetErrorString(CUresult code, const char** text) {
  return word_of(code, text, &Words::text);
}

EXPORTED CUresult cuDeviceGetCount(int* count) {
  ENTER;
  *count = driver().devices;
  return kSuccess;
}

EXPORTED CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  ENTER;
  if (ordinal < 0 || ordinal >= driver().devices) return kInvalidDevice;
  *device = ordinal;
  return kSuccess;
}

EXPORTED CUresult cuDeviceGetUuid(char* sixteen_bytes, CUdevice device) {
  ENTER;
  std::memset(sixteen_bytes, 0x5E, 16);
  // Ranks on the hosts that a test pretends to have do not share GPUs.
  const char* host = std::getenv("POLYHVD_HOST_ID");
  if (host != nullptr && *host != '\0') sixteen_bytes[14] = host[std::strlen(host) - 1];
  sixteen_bytes[15] = static_cast<char>(device);
  return kSuccess;
}

// Contexts ------------------------------------------------------------------------------

EXPORTED CUresult cuDevicePrimaryCtxRetain(Handle* context, CUdevice device) {
  ENTER;
  if (device < 0 || device >= driver().devices) return kInvalidDevice;
  ++driver().retained[static_cast<std::size_t>(device)];
  *context = context_of(device);
  return kSuccess;
}

EXPORTED CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  ENTER;
  if (--driver().retained.at(static_cast<std::size_t>(device)) < 0) {
    misuse(__func__, "released more often than retained");
  }
  return kSuccess;
}

EXPORTED CUresult cuCtxPushCurrent_v2(Handle context) {
  ENTER;
  t_contexts.push_back(device_of_context(__func__, context));
  return kSuccess;
}

EXPORTED CUresult cuCtxPopCurrent_v2(Handle* context) {
  // It works after an error, too, or threads would keep what they must give back.
  if (t_contexts.empty()) misuse(__func__, "no context is current on this thread");
  if (context != nullptr) *context = context_of(t_contexts.back());
  t_contexts.pop_back();
  return kSuccess;
}

EXPORTED CUresult cuCtxGetCurrent(Handle* context) {
  ENTER;
  *context = t_contexts.empty() ? nullptr : context_of(t_contexts.back());
  return kSuccess;
}

EXPORTED CUresult cuCtxSetCurrent(Handle context) {
  ENTER;
  if (!t_contexts.empty()) t_contexts.pop_back();
  if (context != nullptr) t_contexts.push_back(device_of_context(__func__, context));
  return kSuccess;
}

EXPORTED CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  ENTER;
  current_device(__func__);
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return kSuccess;
}

// Memory --------------------------------------------------------------------------------

EXPORTED CUresult cuMemAlloc_v2(CUdeviceptr* address, std::size_t bytes) {
  ENTER;
  const int device = current_device(__func__);
  if (bytes == 0) return kInvalidValue;
  const int file = memfd_create("stand-in of a GPU", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(bytes)) != 0) misuse(__func__, "no memory");
  void* reserved = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, file, 0);
  void* view = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (reserved == MAP_FAILED || view == MAP_FAILED) misuse(__func__, "no memory");
  std::memset(view, 0xFF, bytes);
  *address = reinterpret_cast<CUdeviceptr>(reserved);
  driver().memory[*address] = {bytes, device, static_cast<std::byte*>(view)};
  return kSuccess;
}

// As on a device, it ends when everything is done that may use the memory.
EXPORTED CUresult cuMemFree_v2(CUdeviceptr address) {
  ENTER;
  current_device(__func__);
  auto found = driver().memory.find(address);
  if (found == driver().memory.end() || found->second.device < 0) {
    misuse(__func__, "this is no allocation of a device");
  }
  drain_device(lock, found->second.device);
  found = driver().memory.find(address);
  const Memory memory = found->second;
  driver().memory.erase(found);
  munmap(memory.view, memory.bytes);
  // The address stays reserved, without memory behind it.
  (void)!mmap(reinterpret_cast<void*>(address), memory.bytes, PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return kSuccess;
}

EXPORTED CUresult cuMemHostAlloc(void** address, std::size_t bytes, unsigned) {
  ENTER;
  current_device(__func__);
  if (bytes == 0) return kInvalidValue;
  *address = std::malloc(bytes);
  std::memset(*address, 0xFF, bytes);
  driver().memory[reinterpret_cast<std::uintptr_t>(*address)] = {bytes, -1,
                                                                 static_cast<std::byte*>(*address)};
  return kSuccess;
}

// A copy that comes later is an error of the program, and is found when it runs.
EXPORTED CUresult cuMemFreeHost(void* address) {
  ENTER;
  current_device(__func__);
  const auto found = driver().memory.find(reinterpret_cast<std::uintptr_t>(address));
  if (found == driver().memory.end() || found->second.device >= 0) {
    misuse(__func__, "this is no pinned memory");
  }
  std::memset(address, 0xFF, found->second.bytes);
  driver().memory.erase(found);
  std::free(address);
  return kSuccess;
}

// CU_POINTER_ATTRIBUTE_MEMORY_TYPE is 2 (of which 1 is the host and 2 a device), _DEVICE_ORDINAL 9.

EXPORTED CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, std::size_t bytes,
                                       Handle handle) {
  ENTER;
  const auto stream = find_stream(__func__, handle);
  const bool pinned = is_pinned(to, bytes);
  const char* call = __func__;
  give_copy(*stream, call, bytes, [=] {
    if (pinned && !is_pinned(to, bytes)) misuse(call, "pinned memory was freed before the copy");
    return std::pair<std::byte*, const std::byte*>(static_cast<std::byte*>(to),
                                                   view_of_device(call, from, bytes));
  });
  if (!pinned) drain(lock, stream);  // such a copy is over when the call returns
  return kSuccess;
}

EXPORTED CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, std::size_t bytes,
                                       Handle handle) {
  ENTER;
  const auto stream = find_stream(__func__, handle);
  const bool pinned = is_pinned(from, bytes);
  const char* call = __func__;
  // What is not pinned is read before the call returns.
  auto copy = std::make_shared<std::vector<std::byte>>();
  if (!pinned) {
    const auto* data = static_cast<const std::byte*>(from);
    copy->assign(data, data + bytes);
  }
  give_copy(*stream, call, bytes, [=] {
    if (pinned && !is_pinned(from, bytes)) misuse(call, "pinned memory was freed before the copy");
    const auto* data = pinned ? static_cast<const std::byte*>(from) : copy->data();
    return std::pair<std::byte*, const std::byte*>(view_of_device(call, to, bytes), data);
  });
  return kSuccess;
}

EXPORTED CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, std::size_t bytes,
                                       Handle handle) {
  ENTER;
  const auto stream = find_stream(__func__, handle);
  const char* call = __func__;
  give_copy(*stream, call, bytes, [=] {
    return std::pair<std::byte*, const std::byte*>(view_of_device(call, to, bytes),
                                                   view_of_device(call, from, bytes));
  });
  return kSuccess;
}

// Streams and events --------------------------------------------------------------------

EXPORTED CUresult cuStreamCreateWithPriority(Handle* handle, unsigned, int) {
  ENTER;
  *handle = driver().new_handle();
  driver().streams[*handle] = make_stream(current_device(__func__));
  return kSuccess;
}

EXPORTED CUresult cuStreamCreate(Handle* handle, unsigned) {
  ENTER;
  *handle = driver().new_handle();
  driver().streams[*handle] = make_stream(current_device(__func__));
  return kSuccess;
}

// What it was given still runs.
EXPORTED CUresult cuStreamDestroy_v2(Handle handle) {
  ENTER;
  const auto stream = find_stream(__func__, handle);
  if (driver().streams.erase(handle) == 0) misuse(__func__, "a default stream");
  stream->destroyed = true;
  stream->arrivals.notify_one();
  return kSuccess;
}

EXPORTED CUresult cuStreamSynchronize(Handle handle) {
  ENTER;
  drain(lock, find_stream(__func__, handle));
  return kSuccess;
}

EXPORTED CUresult cuStreamWaitEvent(Handle handle, Handle event_handle, unsigned) {
  ENTER;
  const auto stream = find_stream(__func__, handle);
  const auto event = find_event(__func__, event_handle);
  if (event->recorded == 0) misuse(__func__, "the event was never recorded");
  give(*stream, [event, version = event->recorded] {
    Lock inner(driver().mutex);
    driver().progress.wait(inner, [&] { return event->reached >= version; });
  });
  return kSuccess;
}

EXPORTED CUresult cuEventCreate(Handle* handle, unsigned) {
  ENTER;
  current_device(__func__);
  *handle = driver().new_handle();
  driver().events[*handle] = std::make_shared<Event>();
  return kSuccess;
}

EXPORTED CUresult cuEventRecord(Handle event_handle, Handle handle) {
  ENTER;
  const auto stream = find_stream(__func__, handle);
  const auto event = find_event(__func__, event_handle);
  give(*stream, [event, version = ++event->recorded] {
    const Lock inner(driver().mutex);
    event->reached = std::max(event->reached, version);
  });
  return kSuccess;
}

EXPORTED CUresult cuEventQuery(Handle handle) {
  ENTER;
  const auto event = find_event(__func__, handle);
  if (event->recorded == 0) misuse(__func__, "the event was never recorded");
  return event->reached == event->recorded ? kSuccess : kNotReady;
}

EXPORTED CUresult cuEventDestroy_v2(Handle handle) {
  ENTER;
  find_event(__func__, handle);
  driver().events.erase(handle);
  return kSuccess;
}

}  // namespace stand_in
