#include "gpu/driver.h"

#include <dlfcn.h>

#include <array>
#include <utility>

#include "control/error.h"

// Declared by hand after cuda.h. A number at the end of a symbol is the version of its ABI,
// which the header hides behind a macro.

namespace polyhvd::gpu {
namespace {

constexpr Code kSuccess = 0;
constexpr Code kOutOfMemory = 2;
constexpr Code kNotReady = 600;
// The first and the last of those that leave a context broken.
constexpr Code kFirstBroken = 700;
constexpr Code kLastBroken = 721;

constexpr unsigned kPortable = 1;       // CU_MEMHOSTALLOC_PORTABLE
constexpr unsigned kNonBlocking = 1;    // CU_STREAM_NON_BLOCKING
constexpr unsigned kDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING

[[noreturn]] void refuse(int rank, const std::string& why) {
  throw Failure(ErrorCode::kInvalidArgument, "rank " + std::to_string(rank) + ": " + why);
}

template <class F>
void find(void* library, const char* symbol, F& function) {
  function = reinterpret_cast<F>(dlsym(library, symbol));
  if (function == nullptr) {
    throw Failure(ErrorCode::kInvalidArgument, std::string("it has no ") + symbol);
  }
}

Functions find_all(void* library) {
  Functions f{};
#define POLYHVD_FIND(name, version) find(library, "cu" #name version, f.name)
  POLYHVD_FIND(Init, "");
  POLYHVD_FIND(GetErrorName, "");
  POLYHVD_FIND(GetErrorString, "");
  POLYHVD_FIND(DeviceGetCount, "");
  POLYHVD_FIND(DeviceGet, "");
  POLYHVD_FIND(DeviceGetUuid, "");
  POLYHVD_FIND(DevicePrimaryCtxRetain, "");
  POLYHVD_FIND(DevicePrimaryCtxRelease, "_v2");
  POLYHVD_FIND(CtxPushCurrent, "_v2");
  POLYHVD_FIND(CtxPopCurrent, "_v2");
  POLYHVD_FIND(CtxGetStreamPriorityRange, "");
  POLYHVD_FIND(MemAlloc, "_v2");
  POLYHVD_FIND(MemFree, "_v2");
  POLYHVD_FIND(MemHostAlloc, "");
  POLYHVD_FIND(MemFreeHost, "");
  POLYHVD_FIND(MemcpyDtoHAsync, "_v2");
  POLYHVD_FIND(MemcpyHtoDAsync, "_v2");
  POLYHVD_FIND(MemcpyDtoDAsync, "_v2");
  POLYHVD_FIND(StreamCreateWithPriority, "");
  POLYHVD_FIND(StreamDestroy, "_v2");
  POLYHVD_FIND(StreamSynchronize, "");
  POLYHVD_FIND(StreamWaitEvent, "");
  POLYHVD_FIND(EventCreate, "");
  POLYHVD_FIND(EventRecord, "");
  POLYHVD_FIND(EventQuery, "");
  POLYHVD_FIND(EventDestroy, "_v2");
#undef POLYHVD_FIND
  return f;
}

const char* advice_for(Code code) {
  if (code == kOutOfMemory) return "; free some memory, or use smaller batches";
  if (code < kFirstBroken || code > kLastBroken) return "";
  return "; this process can no longer use the GPU. Earlier work on it may be the cause: run the "
         "program with compute-sanitizer";
}

// For cleanup: the driver may have ended before, and an error could not be handled.
class CurrentAtEnd {
 public:
  explicit CurrentAtEnd(const Context& context)
      : functions_(context.functions()),
        is_current_(functions_.CtxPushCurrent(context.handle()) == kSuccess) {}
  ~CurrentAtEnd() {
    Handle unused = nullptr;
    if (is_current_) functions_.CtxPopCurrent(&unused);
  }
  CurrentAtEnd(const CurrentAtEnd&) = delete;
  CurrentAtEnd& operator=(const CurrentAtEnd&) = delete;
  explicit operator bool() const noexcept { return is_current_; }

 private:
  const Functions& functions_;
  const bool is_current_;
};

Address address_of(const std::byte* data) { return reinterpret_cast<std::uintptr_t>(data); }

}  // namespace

// An event of a context's: one of its free ones, for as long as this lives, or another library's.
// A stream that waits for it keeps waiting for this recording, whatever the event is
// used for later.
class Event final : public DeviceEvent {
 public:
  Event(ContextPtr context, Handle handle, bool is_ours)
      : context_(std::move(context)), handle_(handle), is_ours_(is_ours) {}
  ~Event() override {
    if (!is_ours_) return;
    const std::lock_guard lock(context_->mutex_);
    context_->free_events_.push_back(handle_);
  }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(Stream stream) const {
    context_->check(context_->functions().EventRecord(handle_, stream), "cuEventRecord");
  }
  bool reached() const override {
    if (reached_.load(std::memory_order_acquire)) return true;
    const Current current(*context_);
    const Code code = context_->functions().EventQuery(handle_);
    if (code == kNotReady) return false;
    context_->check(code, "cuEventQuery");
    reached_.store(true, std::memory_order_release);
    return true;
  }
  void hold(Stream stream) const override {
    if (reached_.load(std::memory_order_acquire)) return;
    const Current current(*context_);
    context_->check(context_->functions().StreamWaitEvent(stream, handle_, 0), "cuStreamWaitEvent");
  }

 private:
  ContextPtr context_;
  const Handle handle_;
  const bool is_ours_;
  mutable std::atomic<bool> reached_{false};
};

// Driver ------------------------------------------------------------------------------

const Functions& Driver::functions() {
  if (!loaded_.load(std::memory_order_acquire)) load();
  return functions_;
}

void Driver::load() {
  const std::lock_guard lock(mutex_);
  if (loaded_.load(std::memory_order_relaxed)) return;
  const std::string driver = "the CUDA driver (" + library_ + ")";
  // Frameworks that have a GPU in use have it open already; never closed, as its own threads
  // may outlive us.
  void* library = dlopen(library_.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    refuse(
        rank_,
        driver + " cannot be loaded (" + dlerror() +
            "), so tensors on GPUs are not supported; move them to the CPU, or install the driver");
  }
  try {
    functions_ = find_all(library);
  } catch (const Failure& failure) {
    refuse(rank_, driver + " cannot be used: " + failure.what() + "; CUDA 11 or newer is needed");
  }
  if (const Code code = functions_.Init(0); code != kSuccess) {
    refuse(rank_, driver + " does not start: " + words_for(code) +
                      "; check nvidia-smi and CUDA_VISIBLE_DEVICES");
  }
  loaded_.store(true, std::memory_order_release);
}

std::string Driver::words_for(Code code) const {
  const char* name = nullptr;
  const char* text = nullptr;
  functions_.GetErrorName(code, &name);
  functions_.GetErrorString(code, &text);
  return std::string(text == nullptr ? "no text" : text) + " (" +
         (name == nullptr ? std::to_string(code) : std::string(name)) + ")";
}

void Driver::check(Code code, const char* call, int device) const {
  if (code == kSuccess) return;
  const std::string where = device < 0 ? "" : " on GPU " + std::to_string(device);
  throw Failure(ErrorCode::kInternal, "rank " + std::to_string(rank_) + ": " + call + where +
                                          " failed: " + words_for(code) + advice_for(code));
}

int Driver::device_count() {
  int count = 0;
  check(functions().DeviceGetCount(&count), "cuDeviceGetCount", -1);
  return count;
}

std::string Driver::uuid_of(int device) {
  std::array<char, 16> bytes{};
  Ordinal ordinal = 0;
  check(functions().DeviceGet(&ordinal, device), "cuDeviceGet", device);
  check(functions().DeviceGetUuid(bytes.data(), ordinal), "cuDeviceGetUuid", device);
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string uuid = "GPU";
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    if (i == 0 || i == 4 || i == 6 || i == 8 || i == 10) uuid += '-';
    const auto byte = static_cast<unsigned char>(bytes[i]);
    uuid += {kDigits[byte >> 4], kDigits[byte & 15]};
  }
  return uuid;
}

// Context -----------------------------------------------------------------------------

ContextPtr Context::open(std::shared_ptr<Driver> driver, int device) {
  const Functions& functions = driver->functions();
  const int count = driver->device_count();
  if (device < 0 || device >= count) {
    refuse(driver->rank(), "GPU " + std::to_string(device) +
                               " does not exist; number of GPUs that the driver reports: " +
                               std::to_string(count) + "; check CUDA_VISIBLE_DEVICES");
  }
  Ordinal ordinal = 0;
  driver->check(functions.DeviceGet(&ordinal, device), "cuDeviceGet", device);
  Handle handle = nullptr;
  driver->check(functions.DevicePrimaryCtxRetain(&handle, ordinal), "cuDevicePrimaryCtxRetain",
                device);
  return ContextPtr(new Context(std::move(driver), device, ordinal, handle));
}

Context::Context(std::shared_ptr<Driver> driver, int device, Ordinal ordinal, Handle handle)
    : driver_(std::move(driver)),
      functions_(driver_->functions()),
      device_(device),
      ordinal_(ordinal),
      handle_(handle) {}

Context::~Context() {
  if (const CurrentAtEnd current(*this); current) {
    for (const Handle event : free_events_) functions_.EventDestroy(event);
  }
  functions_.DevicePrimaryCtxRelease(ordinal_);
}

Handle Context::take_event() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_events_.empty()) {
      const Handle event = free_events_.back();
      free_events_.pop_back();
      return event;
    }
  }
  Handle event = nullptr;
  check(functions_.EventCreate(&event, kDisableTiming), "cuEventCreate");
  return event;
}

DeviceEventPtr Context::record(Stream stream) {
  const Current current(*this);
  const auto event = std::make_shared<Event>(shared_from_this(), take_event(), true);
  event->record(stream);
  return event;
}

DeviceEventPtr Context::borrow(RawEvent event) {
  return std::make_shared<Event>(shared_from_this(), event, false);
}

std::shared_ptr<std::byte> Context::allocate(std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const Current current(*this);
  Address address = 0;
  check(functions_.MemAlloc(&address, bytes), "cuMemAlloc");
  const auto end = [context = shared_from_this()](std::byte* data) {
    const CurrentAtEnd current(*context);
    if (current) context->functions().MemFree(address_of(data));
  };
  return {reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address)), end};
}

Current::Current(const Context& context) : functions_(context.functions()) {
  context.check(functions_.CtxPushCurrent(context.handle()), "cuCtxPushCurrent");
}

Current::~Current() {
  Handle unused = nullptr;
  functions_.CtxPopCurrent(&unused);
}

// Streams and memory ------------------------------------------------------------------

OwnStream::OwnStream(ContextPtr context, bool urgent) : context_(std::move(context)) {
  const Current current(*context_);
  const Functions& functions = context_->functions();
  int least = 0;
  int greatest = 0;
  context_->check(functions.CtxGetStreamPriorityRange(&least, &greatest),
                  "cuCtxGetStreamPriorityRange");
  context_->check(
      functions.StreamCreateWithPriority(&handle_, kNonBlocking, urgent ? greatest : least),
      "cuStreamCreateWithPriority");
}

OwnStream::~OwnStream() {
  const CurrentAtEnd current(*context_);
  if (current) context_->functions().StreamDestroy(handle_);
}

void OwnStream::copy_to_host(std::byte* to, const std::byte* from, std::size_t bytes) const {
  const Current current(*context_);
  context_->check(context_->functions().MemcpyDtoHAsync(to, address_of(from), bytes, handle_),
                  "cuMemcpyDtoHAsync");
}

void OwnStream::copy_to_device(std::byte* to, const std::byte* from, std::size_t bytes) const {
  const Current current(*context_);
  context_->check(context_->functions().MemcpyHtoDAsync(address_of(to), from, bytes, handle_),
                  "cuMemcpyHtoDAsync");
}

void OwnStream::drain() const {
  const Current current(*context_);
  context_->check(context_->functions().StreamSynchronize(handle_), "cuStreamSynchronize");
}

PinnedMemory::PinnedMemory(ContextPtr context, std::size_t bytes)
    : context_(std::move(context)), bytes_(bytes) {
  const Current current(*context_);
  void* data = nullptr;
  const Code code = context_->functions().MemHostAlloc(&data, bytes, kPortable);
  const std::string call = "cuMemHostAlloc of " + std::to_string(bytes) + " bytes";
  context_->check(code, call.c_str());
  data_ = static_cast<std::byte*>(data);
}

PinnedMemory::~PinnedMemory() {
  if (data_ == nullptr) return;
  const CurrentAtEnd current(*context_);
  if (current) context_->functions().MemFreeHost(data_);
}

}  // namespace polyhvd::gpu
