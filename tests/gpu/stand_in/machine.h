// What the test double of the CUDA driver simulates: streams, events and memory. It stands in
// for hardware, and knows nothing of how the driver's functions are called (cuda.cc).
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace stand_in {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using Handle = void*;

inline constexpr CUresult kSuccess = 0;
inline constexpr CUresult kInvalidValue = 1;
inline constexpr CUresult kNotInitialized = 3;
inline constexpr CUresult kNoDevice = 100;
inline constexpr CUresult kInvalidDevice = 101;
inline constexpr CUresult kNotReady = 600;
inline constexpr CUresult kIllegalAddress = 700;

[[noreturn]] inline void misuse(const char* call, const std::string& what) {
  std::fprintf(stderr, "stand-in of the CUDA driver: %s: %s\n", call, what.c_str());
  std::abort();
}

inline long number_from(const char* variable, long otherwise) {
  const char* text = std::getenv(variable);
  return text == nullptr ? otherwise : std::atol(text);
}

struct Event {
  std::uint64_t recorded = 0;  // how often
  std::uint64_t reached = 0;   // the last of these that a stream has got to
};

struct Stream {
  int device = 0;
  std::uint32_t seed = 0;
  std::deque<std::function<void()>> tasks;  // the front one is running
  std::condition_variable arrivals;
  bool destroyed = false;
};

struct Memory {
  std::size_t bytes = 0;
  int device = -1;            // -1: pinned memory of the host
  std::byte* view = nullptr;  // what the CPU may touch
};

struct Driver {
  std::mutex mutex;  // guards everything here, and what the handles stand for
  std::condition_variable progress;
  bool initialized = false;
  bool broken = false;
  std::map<std::string, long> calls;
  std::uintptr_t last_handle = 0x5EED0000;
  std::vector<int> retained;
  std::map<Handle, std::shared_ptr<Stream>> streams;
  std::map<int, std::shared_ptr<Stream>> default_streams;
  std::map<Handle, std::shared_ptr<Event>> events;
  std::map<std::uintptr_t, Memory> memory;  // by address

  const int devices = static_cast<int>(number_from("POLYHVD_STAND_IN_CUDA_DEVICES", 2));
  Handle new_handle() { return reinterpret_cast<Handle>(last_handle += 16); }
};

// Never destroyed: streams' threads run until the process is over.
inline Driver& driver() {
  static auto* instance = new Driver;
  return *instance;
}

using Lock = std::unique_lock<std::mutex>;

inline thread_local std::vector<int> t_contexts;  // devices, the current one last

inline Handle context_of(int device) { return reinterpret_cast<Handle>(0xC0000000 + 16L * device); }
inline int device_of_context(const char* call, Handle context) {
  const auto device = (reinterpret_cast<std::intptr_t>(context) - 0xC0000000) / 16;
  if (device < 0 || device >= driver().devices) misuse(call, "this is no context");
  return static_cast<int>(device);
}

inline int current_device(const char* call) {
  if (t_contexts.empty()) misuse(call, "no context is current on this thread");
  if (driver().retained[static_cast<std::size_t>(t_contexts.back())] <= 0) {
    misuse(call, "the current context has been released");
  }
  return t_contexts.back();
}

inline void run(const std::shared_ptr<Stream>& stream) {
  Driver& d = driver();
  std::minstd_rand random(stream->seed);
  Lock lock(d.mutex);
  for (;;) {
    stream->arrivals.wait(lock, [&] { return !stream->tasks.empty() || stream->destroyed; });
    if (stream->tasks.empty()) return;
    const std::function<void()> task = stream->tasks.front();
    lock.unlock();
    const auto dice = random() % 16;
    if (dice == 0) std::this_thread::sleep_for(std::chrono::microseconds(200 + random() % 400));
    if (dice < 6) std::this_thread::sleep_for(std::chrono::microseconds(random() % 40));
    task();
    lock.lock();
    stream->tasks.pop_front();
    d.progress.notify_all();
  }
}

inline std::shared_ptr<Stream> make_stream(int device) {
  auto stream = std::make_shared<Stream>();
  stream->device = device;
  static std::uint32_t number = 0;
  stream->seed = static_cast<std::uint32_t>(number_from("POLYHVD_STAND_IN_CUDA_SEED", 1)) * 1000 +
                 ++number + static_cast<std::uint32_t>(getpid());
  std::thread([stream] { run(stream); }).detach();
  return stream;
}

inline std::shared_ptr<Stream> find_stream(const char* call, Handle handle) {
  Driver& d = driver();
  const int device = current_device(call);
  // CU_STREAM_LEGACY and CU_STREAM_PER_THREAD are 1 and 2.
  if (reinterpret_cast<std::uintptr_t>(handle) <= 2) {
    auto& stream = d.default_streams[device];
    if (!stream) stream = make_stream(device);
    return stream;
  }
  const auto found = d.streams.find(handle);
  if (found == d.streams.end()) misuse(call, "the stream is unknown, or has been destroyed");
  return found->second;
}

inline std::shared_ptr<Event> find_event(const char* call, Handle handle) {
  const auto found = driver().events.find(handle);
  if (found == driver().events.end()) misuse(call, "the event is unknown, or has been destroyed");
  return found->second;
}

inline void give(Stream& stream, std::function<void()> task) {
  stream.tasks.push_back(std::move(task));
  stream.arrivals.notify_one();
}

// All that the stream was given before this call.
inline void drain(Lock& lock, const std::shared_ptr<Stream>& stream) {
  if (stream->tasks.empty()) return;
  auto done = std::make_shared<bool>(false);
  give(*stream, [done] {
    const Lock inner(driver().mutex);
    *done = true;
  });
  driver().progress.wait(lock, [&] { return *done; });
}

inline void drain_device(Lock& lock, int device) {
  std::vector<std::shared_ptr<Stream>> streams;
  for (const auto& [handle, stream] : driver().streams) streams.push_back(stream);
  for (const auto& [number, stream] : driver().default_streams) streams.push_back(stream);
  for (const auto& stream : streams) {
    if (device < 0 || stream->device == device) drain(lock, stream);
  }
}

// The live allocation that holds all of these bytes; null if there is none.
inline const Memory* find_memory(std::uintptr_t address, std::size_t bytes, std::size_t& offset) {
  auto after = driver().memory.upper_bound(address);
  if (after == driver().memory.begin()) return nullptr;
  const auto& [begin, memory] = *--after;
  offset = address - begin;
  return offset <= memory.bytes && bytes <= memory.bytes - offset ? &memory : nullptr;
}

inline std::byte* view_of_device(const char* call, CUdeviceptr address, std::size_t bytes) {
  std::size_t offset = 0;
  const Memory* memory = find_memory(address, bytes, offset);
  if (memory == nullptr || memory->device < 0) {
    misuse(call, "these " + std::to_string(bytes) + " bytes are in no allocation of a device");
  }
  return memory->view + offset;
}

inline bool is_pinned(const void* data, std::size_t bytes) {
  std::size_t offset = 0;
  const Memory* memory = find_memory(reinterpret_cast<std::uintptr_t>(data), bytes, offset);
  if (memory != nullptr && memory->device >= 0) misuse("a copy", "device memory given for host's");
  return memory != nullptr;
}

// `look` gives both ends when the copy is made, and again finds them alive.
inline void give_copy(Stream& stream, const char* call, std::size_t bytes,
                      std::function<std::pair<std::byte*, const std::byte*>()> look) {
  if (bytes == 0) misuse(call, "a copy of no bytes");
  look();
  give(stream, [bytes, look = std::move(look)] {
    Lock lock(driver().mutex);
    const auto [to, from] = look();
    lock.unlock();
    std::memcpy(to, from, bytes);
  });
}

}  // namespace stand_in
