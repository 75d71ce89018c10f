// Waits for what MXNet's engine has been given, which leave errors where they are: MXNet's own
// waits hand an error out and forget it.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include "library.h"
#include "mxnet_c_api.h"

namespace polyhvd::mxnet {

// By which MXNet's engine orders operations.
struct Variable {
  void* handle;
};

// An operation on one array that reports when it, and all operations before it, are over.
class Fence {
 public:
  // Of no array: behind what MXNet's first worker can run by now.
  Fence() : state_(std::make_shared<State>()) { push(nullptr, Kind::kNone); }

  // Writes the array, also if it holds an error, and leaves this one in it; empty: is skipped then.
  Fence(NDArrayHandle array, const std::string& error) : state_(std::make_shared<State>()) {
    state_->error = error;
    push(array, Kind::kWrites);
  }

  // Copies so many elements of the array meanwhile, if it is one that can be read by address.
  Fence(NDArrayHandle array, void* data, std::size_t size) : state_(std::make_shared<State>()) {
    state_->array = array;
    state_->data = data;
    state_->size = size;
    push(array, Kind::kReads);
  }

  // Reads the variable of an array.
  explicit Fence(Variable variable) : state_(std::make_shared<State>()) {
    check(g_mx.MXEnginePushAsync(&run, new Shared(state_), &end, &kCpu, &variable.handle, 1,
                                 nullptr, 0, &kAsync, 0, kLabel, false));
  }

  void wait() const { state_->over.wait(false); }
  bool is_over() const { return state_->over.load(); }
  // Once it is over: whether it ran. Else it was skipped, as the array holds an error.
  bool has_run() const { return state_->ran; }
  bool has_copied() const { return state_->copied; }

 private:
  static constexpr Context kCpu{kDevCpu, 0};
  static constexpr char kLabel[] = "polyhvd fence";

  enum class Kind { kNone, kReads, kWrites };  // a write is also behind what reads the array now

  struct State {
    NDArrayHandle array = nullptr;
    void* data = nullptr;
    std::size_t size = 0;
    std::string error;
    bool ran = false;  // both written before `over`
    bool copied = false;
    std::atomic<bool> over{false};
  };
  using Shared = std::shared_ptr<State>;

  void push(NDArrayHandle array, Kind kind) {
    NDArrayHandle arrays[] = {array};
    const int reads = kind == Kind::kReads ? 1 : 0;
    const int writes = kind == Kind::kWrites ? 1 : 0;
    check(g_mx.MXEnginePushAsyncND(&run, new Shared(state_), &end, &kCpu, arrays, reads, arrays,
                                   writes, reads != 0 ? &kAsync : &kNormal, 0, kLabel,
                                   !state_->error.empty()));
  }

  static void run(void*, void* on_complete, void* param) {
    State& state = **static_cast<Shared*>(param);
    state.ran = true;
    state.copied = state.data != nullptr && copy(state);
    OnComplete complete{};
    std::memcpy(&complete, on_complete, sizeof complete);
    const std::runtime_error error(state.error);
    complete.callback(complete.engine, complete.param, state.error.empty() ? nullptr : &error);
  }

  // Also when it was skipped.
  static void end(void* param) {
    const std::unique_ptr<Shared> state(static_cast<Shared*>(param));
    (*state)->over.store(true);
    (*state)->over.notify_all();
  }

  static bool copy(const State& state) {
    int storage = -1;
    Context context{};
    int ndim = -1;
    const std::int64_t* dims = nullptr;
    void* data = nullptr;
    if (g_mx.MXNDArrayGetStorageType(state.array, &storage) != 0 || storage != kDefaultStorage ||
        g_mx.MXNDArrayGetContext(state.array, &context.dev_type, &context.dev_id) != 0 ||
        (context.dev_type != kDevCpu && context.dev_type != kDevCpuPinned &&
         context.dev_type != kDevCpuShared) ||
        (g_mx.reorder != nullptr && g_mx.in_onednn_layout(chunk_of(state.array))) ||
        g_mx.MXNDArrayGetShapeEx64(state.array, &ndim, &dims) != 0 || ndim < 0 ||
        g_mx.MXNDArrayGetData(state.array, &data) != 0 || data == nullptr) {
      return false;
    }
    std::size_t count = 1;
    for (int i = 0; i < ndim; ++i) count *= static_cast<std::size_t>(dims[i]);
    const int dtype = dtype_of(state.array);
    if (count != state.size || dtype < 0) return false;
    std::memcpy(state.data, data, count * item_bytes(static_cast<DType>(dtype)));
    return true;
  }

  Shared state_;
};

using Clock = std::chrono::steady_clock;

// Returns when `is_so()`, or at the deadline; whether it is so.
template <class Condition>
bool await(Clock::time_point deadline, Condition&& is_so) {
  constexpr std::chrono::microseconds kPause{200};
  while (!is_so()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

}  // namespace polyhvd::mxnet
