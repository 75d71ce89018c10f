#include "kernels.h"

#include <array>
#include <atomic>
#include <bit>
#include <deque>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "block_pool.h"
#include "control/error.h"
#include "control/types.h"

namespace polyhvd::tf {
namespace {

constexpr std::size_t kMessageBytes = 8192;
constexpr std::int32_t kNoEngine = -1;  // no value of error.h

// By DType.
constexpr std::array<std::size_t, kDTypeCount> kItemBytes{1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 2, 4, 8};

// Never destroyed: TensorFlow's threads may outlive static objects.
BlockPool& block_pool() {
  static BlockPool& pool = *new BlockPool;
  return pool;
}

std::optional<DType> dtype_of(int type) {
  switch (type) {
    case kFloat:
      return DType::kFloat32;
    case kDouble:
      return DType::kFloat64;
    case kHalf:
      return DType::kFloat16;
    case kBfloat16:
      return DType::kBfloat16;
    case kUint8:
      return DType::kUint8;
    case kInt8:
      return DType::kInt8;
    case kUint16:
      return DType::kUint16;
    case kUint32:
      return DType::kUint32;
    case kUint64:
      return DType::kUint64;
    case kInt16:
      return DType::kInt16;
    case kInt32:
      return DType::kInt32;
    case kInt64:
      return DType::kInt64;
    case kBool:
      return DType::kBool;
    default:
      return std::nullopt;
  }
}

// A lost peer is not kUnavailable: TensorFlow lets only its own communication ops
// return that, and turns it into an internal error for others.
int status_code_of(std::int32_t error_code) {
  if (error_code == kNoEngine) return kFailedPrecondition;
  switch (static_cast<ErrorCode>(error_code)) {
    case ErrorCode::kInvalidArgument:
      return kInvalidArgument;
    case ErrorCode::kRankMismatch:
      return kFailedPrecondition;
    case ErrorCode::kTimeout:
      return kDeadlineExceeded;
    case ErrorCode::kPeerLost:
    case ErrorCode::kPeerDeparted:
    case ErrorCode::kShutdown:
    case ErrorCode::kInterrupted:
    case ErrorCode::kInternal:
      break;
  }
  return kAborted;
}

// The class of polyhvd/errors.py, which does not follow from TensorFlow's class. Empty for a bad
// call, where it does.
std::string_view class_of(std::int32_t error_code) {
  if (error_code == kNoEngine) return "NotInitializedError";
  const auto code = static_cast<ErrorCode>(error_code);
  return code == ErrorCode::kInvalidArgument ? "" : class_name(code);
}

// Whether outputs are like the inputs, so that they may take the inputs' place.
constexpr bool keeps_shape(OpKind kind) {
  return kind == OpKind::kAllreduce || kind == OpKind::kBroadcast;
}

// Kernels ---------------------------------------------------------------------

// One node of a graph, or one set of attributes in eager mode.
struct Kernel {
  OpKind kind = OpKind::kAllreduce;
  std::string name;  // empty: a call without one, which is counted at each execution
  std::string where;
  std::int32_t op = 0;
  std::int32_t root = -1;
  std::int32_t priority = 0;
  bool has_splits = false;
  int generations = 0;  // 1: the last input is the one that a call is for
  std::uint32_t process_set = 0;
  double prescale = 1.0;
  double postscale = 1.0;
  // Executions between submit and done: iterations of a loop may overlap.
  std::atomic<int> in_flight{0};
  std::mutex submitting;  // so that in_flight counts what was submitted before
  // Per input: it was not forwarded the last time, so an attempt would only allocate.
  // Grows at the first execution; a deque, as atomics do not move.
  std::deque<std::atomic<bool>> unforwardable;
};

std::string string_attr(TF_OpKernelConstruction* construction, const char* name) {
  Status status;
  std::int32_t list_size = 0;
  std::int32_t bytes = 0;
  tf.TF_OpKernelConstruction_GetAttrSize(construction, name, &list_size, &bytes, status);
  if (!status.ok() || bytes <= 0) return "";
  std::string value(static_cast<std::size_t>(bytes), '\0');
  tf.TF_OpKernelConstruction_GetAttrString(construction, name, value.data(), value.size(), status);
  return value;
}

std::int64_t int_attr(TF_OpKernelConstruction* construction, const char* name) {
  const Status status;
  std::int64_t value = 0;
  tf.TF_OpKernelConstruction_GetAttrInt64(construction, name, &value, status);
  if (!status.ok()) tf.TF_OpKernelConstruction_Failure(construction, status);
  return value;
}

// How many tensors an op with a list of them has.
std::int32_t list_length(TF_OpKernelConstruction* construction) {
  const Status status;
  std::int32_t length = 0;
  std::int32_t bytes = 0;
  tf.TF_OpKernelConstruction_GetAttrSize(construction, "T", &length, &bytes, status);
  if (!status.ok()) tf.TF_OpKernelConstruction_Failure(construction, status);
  return length;
}

template <OpKind kKind>
void* create_kernel(TF_OpKernelConstruction* construction) {
  auto kernel = std::make_unique<Kernel>();
  kernel->kind = kKind;
  kernel->name = string_attr(construction, "tensor_name");
  kernel->where = string_attr(construction, "where");
  kernel->process_set = static_cast<std::uint32_t>(int_attr(construction, "process_set"));
  kernel->priority = static_cast<std::int32_t>(int_attr(construction, "priority"));
  kernel->generations = static_cast<int>(int_attr(construction, "G"));
  if (reduces(kKind)) {
    kernel->op = static_cast<std::int32_t>(int_attr(construction, "reduce_op"));
    kernel->prescale = std::bit_cast<double>(int_attr(construction, "prescale_bits"));
    kernel->postscale = std::bit_cast<double>(int_attr(construction, "postscale_bits"));
  } else {
    kernel->op = static_cast<std::int32_t>(ReduceOp::kSum);
  }
  if (kKind == OpKind::kBroadcast) {
    kernel->root = static_cast<std::int32_t>(int_attr(construction, "root_rank"));
  }
  if (kKind == OpKind::kAlltoall) kernel->has_splits = int_attr(construction, "has_splits") != 0;
  if (keeps_shape(kKind)) {
    for (std::int32_t i = list_length(construction); i > 0; --i) {
      kernel->unforwardable.emplace_back(false);
    }
  }
  return kernel.release();
}

// Executions ------------------------------------------------------------------

// TensorFlow's `done`, to be run once, on any thread. See TfApi::done_is_owned.
class Done {
 public:
  explicit Done(TF_AsyncOpKernelDoneCallback* callback) {
    if (tf.done_is_owned) {
      callback_ = callback;
      return;
    }
    const auto& original = *reinterpret_cast<const Callback*>(callback);
    original.manage(copy_.stored, original.stored, Callback::kClone);
    copy_.manage = original.manage;
    copy_.invoke = original.invoke;
  }
  Done(Done&& other) noexcept
      : callback_(std::exchange(other.callback_, nullptr)), copy_(std::exchange(other.copy_, {})) {}
  Done(const Done&) = delete;
  Done& operator=(const Done&) = delete;
  ~Done() {
    if (copy_.manage != nullptr) copy_.manage(copy_.stored, copy_.stored, Callback::kDestroy);
  }
  void run() {
    if (callback_ != nullptr) {
      tf.TF_RunAsyncOpKernelDoneCallback(callback_);
    } else {
      copy_.invoke(copy_.stored);
    }
  }

 private:
  TF_AsyncOpKernelDoneCallback* callback_ = nullptr;
  Callback copy_{};
};

struct DeleteTensor {
  void operator()(TF_Tensor* tensor) const noexcept { tf.TF_DeleteTensor(tensor); }
};
using TensorPtr = std::unique_ptr<TF_Tensor, DeleteTensor>;

// A failed step of preparing an execution.
struct Refusal {
  int code;
  std::string message;
};

void check(const Status& status) {
  if (!status.ok()) throw Refusal{tf.TF_GetCode(status), status.message()};
}

// One execution of an op, from compute to done. Deletes itself when it is done.
class Execution {
 public:
  Execution(Kernel& kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done)
      : kernel_(kernel), context_(context), done_(done) {}

  void start() noexcept;

 private:
  void prepare();
  void read_tensor(int index);
  void read_splits();
  void read_generation();
  TensorPtr input(int index) const;
  void* output_for(int index, TensorPtr& input);
  void* view_of_block(int index, std::size_t bytes);
  std::int32_t submit(const polyhvd_engine_api& engine, char* message, std::int32_t& lends);
  void fail(std::int32_t error_code, const char* message) noexcept;
  void finish(int code, const char* message) noexcept;

  static void* allocate(void* self, std::int32_t index, const std::int64_t* shape,
                        std::int32_t ndim);
  static void on_done(void* self, std::int32_t error_code, const char* message);

  Kernel& kernel_;
  TF_OpKernelContext* context_;
  Done done_;
  std::vector<TensorPtr> inputs_;  // null where the input became the output
  std::vector<int> types_;         // TensorFlow's, of inputs and of their outputs
  std::vector<std::vector<std::int64_t>> shapes_;
  std::vector<polyhvd_tensor> in_;
  std::vector<polyhvd_tensor> out_;
  std::vector<std::int64_t> splits_;
  std::uint64_t generation_ = 0;
};

TensorPtr Execution::input(int index) const {
  const Status status;
  TF_Tensor* tensor = nullptr;
  tf.TF_GetInput(context_, index, &tensor, status);
  check(status);
  return TensorPtr(tensor);
}

// Sets an output that lies in a block of the pool and gives it back when it dies.
void* Execution::view_of_block(int index, std::size_t bytes) {
  BlockPool::Block* block = block_pool().take(bytes);
  const auto give_back = [](void*, std::size_t, void* argument) {
    block_pool().give_back(static_cast<BlockPool::Block*>(argument));
  };
  const auto i = static_cast<std::size_t>(index);
  const auto& shape = shapes_[i];
  const TensorPtr view(tf.TF_NewTensor(types_[i], shape.data(), static_cast<int>(shape.size()),
                                       block->data, bytes, give_back, block));
  const Status status;
  tf.TF_SetOutput(context_, index, view.get(), status);
  check(status);
  return tf.TF_TensorData(view.get());
}

// Memory for an output like its input: the input's own if it has no other reader.
// TensorFlow forwards only what has no other reference, so `input` is let go for the
// attempt, and comes back if that failed.
void* Execution::output_for(int index, TensorPtr& input_tensor) {
  const std::size_t bytes = tf.TF_TensorByteSize(input_tensor.get());
  auto& unforwardable = kernel_.unforwardable[static_cast<std::size_t>(index)];
  const bool large = bytes >= BlockPool::kBytesMin;
  if (large && unforwardable.load(std::memory_order_relaxed)) return view_of_block(index, bytes);
  input_tensor.reset();
  const auto& shape = shapes_[static_cast<std::size_t>(index)];
  int forwarded = -1;
  const Status status;
  const TensorPtr output(
      tf.TF_ForwardInputOrAllocateOutput(context_, &index, 1, index, shape.data(),
                                         static_cast<int>(shape.size()), &forwarded, status));
  check(status);
  if (forwarded < 0) {
    if (large) unforwardable.store(true, std::memory_order_relaxed);
    input_tensor = input(index);
  }
  return tf.TF_TensorData(output.get());  // the context owns it as well
}

void Execution::read_tensor(int index) {
  const auto i = static_cast<std::size_t>(index);
  TensorPtr tensor = input(index);
  types_[i] = tf.TF_TensorType(tensor.get());
  const std::optional<DType> dtype = dtype_of(types_[i]);
  if (!dtype) throw Refusal{kInvalidArgument, "the tensor's type is not supported"};
  auto& shape = shapes_[i];
  shape.resize(static_cast<std::size_t>(tf.TF_NumDims(tensor.get())));
  for (std::size_t d = 0; d < shape.size(); ++d) {
    shape[d] = tf.TF_Dim(tensor.get(), static_cast<int>(d));
  }
  in_[i] = {nullptr,
            shape.data(),
            static_cast<std::int32_t>(shape.size()),
            static_cast<std::int32_t>(*dtype),
            static_cast<std::int32_t>(DeviceKind::kCpu),
            0};
  if (out_.empty()) {
    in_[i].data = tf.TF_TensorData(tensor.get());
  } else {
    out_[i] = in_[i];
    out_[i].data = output_for(index, tensor);
    in_[i].data = tensor ? tf.TF_TensorData(tensor.get()) : out_[i].data;
  }
  inputs_.push_back(std::move(tensor));
}

// The second input of an alltoall. Whether the numbers fit is the core's to check.
void Execution::read_splits() {
  const TensorPtr tensor = input(1);
  const std::int64_t count = tf.TF_NumDims(tensor.get()) == 1 ? tf.TF_Dim(tensor.get(), 0) : 0;
  if (count == 0) {
    throw Refusal{
        kInvalidArgument,
        "alltoall '" + kernel_.name +
            "': splits: expected one whole number of rows for each rank, in one dimension"};
  }
  const auto copy = [&](const auto* rows) { splits_.assign(rows, rows + count); };
  const void* data = tf.TF_TensorData(tensor.get());
  if (tf.TF_TensorType(tensor.get()) == kInt32) {
    copy(static_cast<const std::int32_t*>(data));
  } else {
    copy(static_cast<const std::int64_t*>(data));
  }
}

void Execution::read_generation() {
  const TensorPtr tensor = input(tf.TF_NumInputs(context_) - 1);
  if (tf.TF_TensorType(tensor.get()) != kInt64 || tf.TF_NumDims(tensor.get()) != 0) {
    throw Refusal{kInvalidArgument, "the generation of a call is a scalar of int64"};
  }
  generation_ = *static_cast<const std::uint64_t*>(tf.TF_TensorData(tensor.get()));
}

void Execution::prepare() {
  if (kernel_.generations > 0) read_generation();
  if (!has_tensors(kernel_.kind)) return;
  const int count =
      kernel_.kind == OpKind::kAlltoall ? 1 : tf.TF_NumInputs(context_) - kernel_.generations;
  const auto n = static_cast<std::size_t>(count);
  inputs_.reserve(n);
  types_.resize(n);
  shapes_.resize(n);
  in_.resize(n);
  if (keeps_shape(kernel_.kind)) out_.resize(n);
  for (int index = 0; index < count; ++index) read_tensor(index);
  if (kernel_.has_splits) read_splits();
}

std::int32_t Execution::submit(const polyhvd_engine_api& engine, char* message,
                               std::int32_t& lends) {
  polyhvd_submission s{};
  s.size = sizeof s;
  s.name = kernel_.name.empty() ? nullptr : kernel_.name.c_str();
  s.kind = static_cast<std::int32_t>(kernel_.kind);
  s.op = kernel_.op;
  s.root = kernel_.root;
  s.priority = kernel_.priority;
  s.prescale = kernel_.prescale;
  s.postscale = kernel_.postscale;
  s.process_set = kernel_.process_set;
  s.count = static_cast<std::int32_t>(in_.size());
  s.inputs = in_.data();
  s.outputs = out_.empty() ? nullptr : out_.data();
  s.numbers = splits_.empty() ? nullptr : splits_.data();
  s.number_count = static_cast<std::int32_t>(splits_.size());
  s.where = kernel_.where.empty() ? nullptr : kernel_.where.c_str();
  s.lends = &lends;
  s.generation = generation_;
  s.context = this;
  s.allocate = &Execution::allocate;
  s.done = &Execution::on_done;
  Kernel& kernel = kernel_;  // once submitted, another thread may finish and delete this
  std::lock_guard lock(kernel.submitting);
  // Two executions of one node follow each other; two nodes of one name are a mistake.
  s.queue_duplicates = kernel.in_flight.fetch_add(1) > 0 ? 1 : 0;
  const std::int32_t error = engine.submit(engine.engine, &s, message, kMessageBytes);
  if (error != 0) kernel.in_flight.fetch_sub(1);
  return error;
}

void Execution::start() noexcept {
  std::array<char, kMessageBytes> message{};
  std::int32_t error = kNoEngine;
  try {
    prepare();
    const EngineSlot::Visit visit(engine_slot());
    std::int32_t lends = 0;
    if (visit.api() != nullptr) error = submit(*visit.api(), message.data(), lends);
    // If that went well, *this may be gone.
    if (lends != 0) visit.api()->lend(visit.api()->engine);
    if (error == 0) return;
    if (error == kNoEngine && generation_ != 0) {
      constexpr char kEnded[] = "the engine was shut down before TensorFlow ran the operation";
      return fail(static_cast<std::int32_t>(ErrorCode::kShutdown), kEnded);
    }
  } catch (const Refusal& refusal) {
    finish(refusal.code, refusal.message.c_str());
    return;
  } catch (const std::bad_alloc&) {
    finish(kResourceExhausted, "no memory for the outputs of a collective");
    return;
  }
  fail(error,
       error == kNoEngine ? "polyhvd has not been initialized; use hvd.init()." : message.data());
}

void Execution::fail(std::int32_t error_code, const char* message) noexcept {
  const int code = status_code_of(error_code);
  const std::string_view name = class_of(error_code);
  if (name.empty()) return finish(code, message);
  try {
    finish(code, (std::string(name) + ": " + message).c_str());
  } catch (const std::bad_alloc&) {
    finish(code, message);
  }
}

void Execution::finish(int code, const char* message) noexcept {
  if (code != kOk) {
    const Status status(code, message);
    tf.TF_OpKernelContext_Failure(context_, status);
  }
  Done done = std::move(done_);
  delete this;
  done.run();
}

void* Execution::allocate(void* self, std::int32_t index, const std::int64_t* shape,
                          std::int32_t ndim) {
  auto& execution = *static_cast<Execution*>(self);
  // Beyond the inputs are the numbers that an alltoall or a join yields, as int32.
  const auto i = static_cast<std::size_t>(index);
  const bool is_like_input = i < execution.in_.size();
  const auto dtype = is_like_input ? static_cast<DType>(execution.in_[i].dtype) : DType::kInt32;
  const int type = is_like_input ? execution.types_[i] : kInt32;
  std::size_t bytes = kItemBytes[static_cast<std::size_t>(dtype)];
  for (std::int32_t d = 0; d < ndim; ++d) bytes *= static_cast<std::size_t>(shape[d]);
  const Status status;
  const TensorPtr output(
      tf.TF_AllocateOutput(execution.context_, index, type, shape, ndim, bytes, status));
  return status.ok() ? tf.TF_TensorData(output.get()) : nullptr;
}

void Execution::on_done(void* self, std::int32_t error_code, const char* message) {
  auto* execution = static_cast<Execution*>(self);
  execution->kernel_.in_flight.fetch_sub(1);
  if (error_code == 0) return execution->finish(kOk, message);
  execution->fail(error_code, message);
}

}  // namespace

EngineSlot& engine_slot() {
  static EngineSlot& slot = *new EngineSlot;
  return slot;
}

CreateKernel create_function(OpKind kind) {
  switch (kind) {
    case OpKind::kAllreduce:
      return &create_kernel<OpKind::kAllreduce>;
    case OpKind::kAllgather:
      return &create_kernel<OpKind::kAllgather>;
    case OpKind::kBroadcast:
      return &create_kernel<OpKind::kBroadcast>;
    case OpKind::kBarrier:
      return &create_kernel<OpKind::kBarrier>;
    case OpKind::kAlltoall:
      return &create_kernel<OpKind::kAlltoall>;
    case OpKind::kReducescatter:
      return &create_kernel<OpKind::kReducescatter>;
    case OpKind::kJoin:
      return &create_kernel<OpKind::kJoin>;
    default:
      return nullptr;
  }
}

void compute(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
  (new Execution(*static_cast<Kernel*>(kernel), context, done))->start();
}

void compute_generation(void*, TF_OpKernelContext* context) {
  const Status status;
  const TensorPtr output(
      tf.TF_AllocateOutput(context, 0, kInt64, nullptr, 0, sizeof(std::uint64_t), status));
  if (!status.ok()) return tf.TF_OpKernelContext_Failure(context, status);
  const EngineSlot::Visit visit(engine_slot());
  *static_cast<std::uint64_t*>(tf.TF_TensorData(output.get())) =
      visit.api() == nullptr ? 0 : visit.api()->generation;
}

void delete_kernel(void* kernel) { delete static_cast<Kernel*>(kernel); }

}  // namespace polyhvd::tf
