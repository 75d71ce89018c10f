// One operation as its caller handed it in, from submit to done.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "control/device.h"
#include "control/request.h"
#include "control/types.h"

namespace polyhvd {

// What a framework thread hands in. Tensors stay the caller's until done.
struct Submission {
  std::string name;
  OpKind kind = OpKind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;
  Scale scale;
  int root = -1;  // as in Request
  int priority = 0;
  ProcessSetId process_set = kWorld;
  std::vector<TensorView> inputs;
  // As many as inputs, or none: then `allocate` is asked, or else the core allocates.
  // An alltoall has a second output: the rows received from each member, as int32. A
  // join asks `allocate`, if it is there, for an int32: the rank that joined last.
  std::vector<TensorView> outputs;
  // alltoall: rows for each member, or none for equal parts. add_process_set: ranks.
  std::vector<std::int64_t> numbers;
  // Of an allgather and an alltoall: passed once, when all ranks have agreed, before memory for any
  // output is asked for and before data moves. allgather: rows[m * inputs + i] are member m's of
  // input i, none of one that has joined. alltoall: rows[m] come from member m, kNoRows if it
  // has joined.
  std::function<void(std::span<const std::int64_t> rows)> sized;
  std::function<void*(int index, const Shape& shape)> allocate;
  // Exactly once, with no lock held, on any thread; null error on success.
  std::function<void(const Error* error)> done;
  std::string where;
  // Of a call without a name; kNextTurn: counted when it is submitted.
  Turn turn = 0;
  // A name in flight makes this one wait for it instead of failing.
  bool queue_duplicates = false;
  // Of tensors on a device: the stream that makes the inputs and is done with the outputs.
  Stream stream = nullptr;
  RawEvent event = nullptr;    // the inputs are made when it is reached; null: what `stream` does
  bool orders_stream = false;  // before `done`, `stream` waits for the outputs
  DeviceEventPtr ready;        // by Engine::submit: `event`, or where the stream was then
};

inline constexpr Turn kNextTurn = ~Turn{0};
// The number that `sized` receives for a member that takes no part in an alltoall.
inline constexpr std::int64_t kNoRows = -1;

// Makes it a call without a name; its kind is known. Until it has its turn it is called by
// what all of its kind have in common.
inline void leave_unnamed(Submission& s) {
  s.turn = kNextTurn;
  s.name.reserve(40);
  s.name.assign(name_of(s.kind)).append(".noname");
}

// Of its tensors, which are on one.
inline Device device_of(const Submission& s) noexcept {
  return s.inputs.empty() ? Device{} : s.inputs[0].device;
}

// What satisfies() asks of one; see request.h.
inline std::size_t tensor_count(const Submission& s) noexcept { return s.inputs.size(); }
inline const Shape& shape_of(const Submission& s, std::size_t i) noexcept {
  return s.inputs[i].shape;
}
inline DType dtype_of(const Submission& s, std::size_t i) noexcept { return s.inputs[i].dtype; }
inline DeviceKind device_kind_of(const Submission& s) noexcept { return device_of(s).kind; }

// Memory for an output that the core allocated. On a CPU aligned for any vector unit.
class OwnedBuffer {
 public:
  static constexpr std::size_t kAlignment = 64;
  OwnedBuffer(Shape shape, DType dtype, std::size_t bytes)
      : shape_(std::move(shape)),
        dtype_(dtype),
        data_(static_cast<std::byte*>(
            std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  OwnedBuffer(Shape shape, DType dtype, Device device, std::shared_ptr<std::byte> memory)
      : shape_(std::move(shape)),
        dtype_(dtype),
        device_(device),
        on_device_(std::move(memory)),
        data_(on_device_.get()) {}
  ~OwnedBuffer() {
    if (!on_device_) std::free(data_);
  }
  OwnedBuffer(const OwnedBuffer&) = delete;
  OwnedBuffer& operator=(const OwnedBuffer&) = delete;
  const Shape& shape() const noexcept { return shape_; }
  DType dtype() const noexcept { return dtype_; }
  Device device() const noexcept { return device_; }
  std::byte* data() const noexcept { return data_; }

 private:
  Shape shape_;
  DType dtype_;
  Device device_;
  std::shared_ptr<std::byte> on_device_;  // null on a CPU
  std::byte* data_;
};

// Shared by the caller's handle and the engine. Fields are written by the thread
// that the state names; `finished` publishes the last ones to the caller.
class Operation {
 public:
  explicit Operation(Submission&& s) : submission(std::move(s)) {}

  Submission submission;                // by submit, before anybody else sees it
  int position = 0;                     // of this rank in the process set; likewise
  std::uint64_t sequence = 0;           // in the Recorder; by submit, under the queue's lock
  std::optional<CacheId> announced_as;  // the id that was reported; under the queue's lock
  std::uint64_t cache_version = 0;      // at which announced_as was looked up; likewise
  bool announced = false;               // likewise
  bool agreed = false;                  // by the driver: decided, and now work
  bool stands_in = false;               // by the driver: made for a rank that has joined,
  std::vector<std::shared_ptr<OwnedBuffer>> inputs;  // with these for its inputs
  std::vector<std::int64_t> rows;  // by the driver, from the agreement (allgather)

  // Written by the driver before `finished`.
  std::optional<Error> error;
  std::int64_t number = -1;  // join: the last rank; add_process_set: the new set
  std::uint32_t notice = 0;  // the last that precedes it in the total order; 0: not of all ranks
  std::vector<std::shared_ptr<OwnedBuffer>> buffers;
  DeviceEventPtr arrived;  // where the outputs are complete, on a device; null: they are

  // Whether nothing touches the tensors any more.
  bool is_over() const { return is_finished() && (!arrived || arrived->reached()); }
  // The opposite, where no caller could be notified of a failure: then nothing fails, either.
  bool may_be_touched() const noexcept {
    try {
      return !is_over();
    } catch (const Failure&) {
      return false;
    }
  }
  // Sequentially consistent, as finish(): DriverRole::await() looks at it after it has counted
  // itself.
  bool is_finished() const noexcept { return finished_.load(); }
  void finish() noexcept { finished_.store(true); }

 private:
  std::atomic<bool> finished_{false};  // publishes error and buffers
};

using OperationPtr = std::shared_ptr<Operation>;

}  // namespace polyhvd
