// MXNet's engine on one side, the core's C table on the other: a collective is
// an asynchronous engine operation that reads and writes NDArrays. Loaded with
// ctypes, links to nothing, never calls Python. A thread of MXNet's may drive the core
// for a moment (see lend() in c_api.h), and else never blocks.
#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "api/c_api.h"
#include "api/engine_slot.h"
#include "arguments.h"
#include "control/error.h"
#include "control/types.h"
#include "engine/adaptive_backoff.h"
#include "exceptions_lock.h"
#include "failures.h"
#include "fences.h"
#include "library.h"
#include "mxnet_c_api.h"
#include "operation.h"
#include "program_order.h"
#include "waits_guard.h"

#define POLYHVD_EXPORT extern "C" __attribute__((visibility("default")))

namespace polyhvd::mxnet {
namespace {

// types.cc belongs to the core, which this library does not link.
constexpr const char* kKindNames[] = {"allreduce", "allgather", "broadcast",
                                      "barrier",   "alltoall",  "reducescatter"};

constexpr int kSkipped = 100;  // is added to codes of ErrorCode
constexpr char kSkippedText[] = "was not done, as an array of it holds the error of another one";

// Begins messages.
std::string about(std::int32_t kind, const char* name) {
  return std::string(kKindNames[kind]) + " '" + name + "': ";
}
std::string about(const Op& op) { return about(op.submission.kind, op.submission.name); }

// Never destroyed, both: threads of MXNet outlive our static objects at exit.
EngineSlot& g_slot = *new EngineSlot;  // the engine that is current
ProgramOrder<OpPtr>& g_order = *new ProgramOrder<OpPtr>;

void* g_library = nullptr;  // libmxnet.so; set once, before anything else is called

// MXNet's engine: one that runs everything inside the push, or the usual ones.
enum class Kind { kUnknown, kNaive, kThreaded };
std::atomic<Kind> g_kind{Kind::kUnknown};
AdaptiveBackoff g_inside;  // to have an operation run inside the push, as its arrays are ready

Failures<Array>& g_failures = *new Failures<Array>;
Watch g_watch;
// Held while updates are pushed that need what collectives write, and while an error is taken out.
std::recursive_timed_mutex& g_updates = *new std::recursive_timed_mutex;
std::atomic<int> g_held{0};  // of what is in flight, what MXNet has neither run nor skipped

thread_local bool t_ran = false;      // run() has been on this thread
thread_local int t_failure_code = 0;  // of the last polyhvd_mxnet_push of the thread
thread_local std::string t_failure;   // likewise

// What the operation writes.
const std::vector<Array>& written_by(const Op& op) {
  if (op.sized) return op.sized->arrays();
  return op.outputs.empty() ? op.inputs : op.outputs;
}

// Before MXNet is notified, so that the next reader finds it.
void note_failure(const Op& op) {
  const std::vector<Array>& written = written_by(op);
  std::vector<Array> kept;
  kept.reserve(written.size());
  for (const Array& array : written) kept.emplace_back(array.get());
  g_watch.unsettled.fetch_add(static_cast<std::int64_t>(kept.size()));
  g_failures.note(op.generation, op.error_code, op.error, std::move(kept));
  g_watch.failures.fetch_add(1);
}

// As an array of it holds the error of another operation, of ours or of MXNet's.
void note_skipped(Op& op) {
  const auto [code, text] =
      g_failures.has_ended(op.generation) ? g_failures.end() : g_failures.recent();
  const bool is_complete = text.find(kSkippedText) != text.npos;
  op.error = is_complete ? text : about(op) + kSkippedText + (code == 0 ? "." : ": " + text);
  op.was_skipped = true;
  op.error_code.store(code == 0 ? static_cast<int>(ErrorCode::kInternal) : code);
  if (op.sized) return void(op.sized->settle(op.error_code, op.error));  // the call raises it
  note_failure(op);
}

// The inputs are free in any case. A failure is raised by the reader of the outputs, or by the
// call, if it still waits for their sizes.
void complete_sized(Op& op, int code, const char* message) {
  if (code != 0) {
    op.error = message;
    op.error_code.store(code);
  }
  const bool is_taken = op.sized->settle(code, op.error);
  if (code != 0 && (is_taken || ends_engine(static_cast<ErrorCode>(code)))) note_failure(op);
  op.on_complete.callback(op.on_complete.engine, op.on_complete.param, nullptr);
  if (code != 0) ExceptionsLock::arm();
  op.sized->release();
}

void complete(Op& op, int code, const char* message) {
  if (op.sized) return complete_sized(op, code, message);
  if (code == 0) {
    op.on_complete.callback(op.on_complete.engine, op.on_complete.param, nullptr);
    return;
  }
  op.error = message;
  op.error_code.store(code);
  note_failure(op);
  const std::runtime_error error(op.error);
  ExceptionsLock::arm();
  op.on_complete.callback(op.on_complete.engine, op.on_complete.param, &error);
}

// From the core, on any thread.
void on_done(void* context, std::int32_t code, const char* message) {
  const std::unique_ptr<OpPtr> box(static_cast<OpPtr*>(context));
  Op& op = **box;
  if (code != 0 || op.unexpected.empty() || op.fill_absent()) return complete(op, code, message);
  const std::string text = about(op) + "the result has shape " + op.unexpected +
                           ", not the one that the ranks sent before; a rank has joined meanwhile";
  complete(op, static_cast<int>(ErrorCode::kInternal), text.c_str());
}

// From the core, before it asks for memory.
void on_sized(void* context, const std::int64_t* rows, std::int32_t row_count) {
  (*static_cast<OpPtr*>(context))->sized->set_rows(rows, row_count);
}

// From the core: memory for an output whose rows the ranks have agreed on. An alltoall's second
// output has the numbers that on_sized() was given.
void* allocate(void* context, std::int32_t index, const std::int64_t* dims, std::int32_t ndim) {
  Op& op = **static_cast<OpPtr*>(context);
  const Shape shape(dims, dims + ndim);
  const auto i = static_cast<std::size_t>(index);
  if (op.sized && i < op.sized->count()) {
    try {
      return op.sized->make(dims, ndim, op.inputs[i].get());
    } catch (const std::exception&) {
      return nullptr;  // the core reports that there is no memory
    }
  }
  const bool has_place = i < op.places.size();
  if (has_place && op.shapes[op.inputs.size() + i] == shape) return op.places[i];
  if (has_place) op.unexpected = to_string(shape);
  return op.make_spare(i, shape);
}

// Of one that MXNet's engine lets us write, if `written`.
polyhvd_tensor tensor_of(const Array& array, const Shape& shape, int dtype, bool written) {
  // Reading the address of an array in oneDNN's layout would wait for ourselves.
  void* chunk = chunk_of(array.get());
  const auto is_odd = [&] { return g_mx.reorder != nullptr && g_mx.in_onednn_layout(chunk); };
  if (written && is_odd()) g_mx.reorder(chunk);
  if (is_odd()) {
    throw std::runtime_error("an operator has put the array into a layout of oneDNN meanwhile");
  }
  void* data = nullptr;
  check(g_mx.MXNDArrayGetData(array.get(), &data));
  if (data == nullptr && std::find(shape.begin(), shape.end(), 0) == shape.end()) {
    throw std::runtime_error("the array has no memory yet");
  }
  return {data, shape.data(), static_cast<std::int32_t>(shape.size()), dtype, 0, 0};
}

int submit_to_engine(const OpPtr& op, std::int32_t* lends, char* message,
                     std::size_t message_bytes) {
  std::vector<polyhvd_tensor> inputs;
  std::vector<polyhvd_tensor> outputs;
  const std::size_t count = op->inputs.size();
  inputs.reserve(count);
  outputs.reserve(op->outputs.size());
  op->places.reserve(op->outputs.size());
  for (std::size_t i = 0; i < count; ++i) {
    const bool in_place = op->outputs.empty() && !op->sized;
    inputs.push_back(tensor_of(op->inputs[i], op->shapes[i], op->dtypes[i], in_place));
  }
  for (std::size_t i = 0; i < op->outputs.size(); ++i) {
    outputs.push_back(tensor_of(op->outputs[i], op->shapes[count + i], op->dtypes[i], true));
    op->places.push_back(outputs.back().data);
  }
  polyhvd_submission s = op->submission;
  s.inputs = inputs.data();
  s.outputs = outputs.empty() ? inputs.data() : outputs.data();
  if (has_own_rows(static_cast<OpKind>(s.kind))) {
    s.outputs = nullptr;
    s.allocate = &allocate;
    if (op->sized) s.sized = &on_sized;
  }
  auto context = std::make_unique<OpPtr>(op);
  s.context = context.get();
  s.lends = lends;
  s.generation = op->generation;
  const EngineSlot::Visit visit(g_slot);
  const polyhvd_engine_api* engine = visit.api();
  if (engine == nullptr) {
    throw Failure(ErrorCode::kShutdown, "the engine was shut down before MXNet ran the operation");
  }
  const int code = engine->submit(engine->engine, &s, message, message_bytes);
  if (code == 0) (void)context.release();  // on_done has it now
  return code;
}

// The operation's turn has come. Whether the thread is to lend itself to the engine, if it may.
bool submit(const OpPtr& op, bool may_lend) {
  if (!op) return false;  // MXNet skipped it
  std::int32_t lends = 0;
  char message[4096];  // of a failure; else not touched
  int code = 0;
  std::string text;
  try {
    code = submit_to_engine(op, may_lend ? &lends : nullptr, message, sizeof message);
    if (code != 0) text = message;
    std::string named = about(*op);
    named.resize(named.size() - 2);  // without the colon
    if (code != 0 && text.find(named) == text.npos) text = about(*op) + text;
  } catch (const Failure& failure) {
    code = static_cast<int>(failure.error().code);
    text = about(*op) + failure.what();
  } catch (const std::exception& error) {
    code = static_cast<int>(ErrorCode::kInternal);
    text = about(*op) + error.what();
  }
  if (code != 0) complete(*op, code, text.c_str());
  return lends != 0;
}

// From MXNet: the arrays are ours until on_complete is called.
void run(void*, void* on_complete, void* param) {
  const OpPtr op = *static_cast<OpPtr*>(param);
  std::memcpy(&op->on_complete, on_complete, sizeof op->on_complete);
  op->has_run = true;
  g_held.fetch_sub(1);
  t_ran = true;
  bool lends = false;
  g_order.arrive(op->line, op->ticket, op, [&](const OpPtr& next) { lends |= submit(next, true); });
  if (!lends) return;
  const EngineSlot::Visit visit(g_slot);
  if (visit.api() != nullptr) visit.api()->lend(visit.api()->engine);
}

// From MXNet: the operation is complete, or was skipped as an array of it holds an error.
void drop(void* param) {
  const std::unique_ptr<OpPtr> box(static_cast<OpPtr*>(param));
  Op& op = **box;
  if (!op.has_run) {
    note_skipped(op);
    g_held.fetch_sub(1);
    g_order.arrive(op.line, op.ticket, nullptr, [](const OpPtr& next) { submit(next, false); });
  }
  op.inputs.clear();
  op.outputs.clear();
  op.finished.store(true, std::memory_order_release);
  g_watch.in_flight.fetch_sub(1);
}

void push(const OpPtr& op) {
  std::vector<NDArrayHandle> writes;
  if (!op->sized) writes = distinct(written_by(*op), {});
  std::vector<NDArrayHandle> reads = distinct(op->inputs, writes);
  // What is written may be reordered when it is ours: see tensor_of().
  if (g_mx.reorder_async != nullptr) {
    for (const NDArrayHandle array : reads) g_mx.reorder_async(array);
  }
  static constexpr Context kCpu{kDevCpu, 0};
  const Kind kind = g_kind.load(std::memory_order_relaxed);
  const bool inside = kind == Kind::kThreaded && g_inside.worth_it();
  op->ticket = g_order.take(op->line);
  t_ran = false;
  g_watch.pusher.store(static_cast<std::int64_t>(pthread_self()), std::memory_order_relaxed);
  g_watch.in_flight.fetch_add(1);
  g_held.fetch_add(1);
  // MXNet owns the box from here on, and calls drop() in the end.
  const int status = g_mx.MXEnginePushAsyncND(
      &run, new OpPtr(op), &drop, &kCpu, reads.data(), static_cast<int>(reads.size()),
      writes.data(), static_cast<int>(writes.size()), inside ? &kAsync : &kCpuPrioritized,
      op->submission.priority, "polyhvd", false);
  check(status);
  if (inside) g_inside.note(t_ran);
  if (kind == Kind::kUnknown) g_kind.store(t_ran ? Kind::kNaive : Kind::kThreaded);
}

void run_writing(void*, void* on_complete, void* param) {
  OnComplete complete{};
  std::memcpy(&complete, on_complete, sizeof complete);
  g_held.fetch_sub(1);
  (*static_cast<OpPtr*>(param))->sized->write(complete);
}

void drop_writing(void* param) {
  const std::unique_ptr<OpPtr> box(static_cast<OpPtr*>(param));
  g_watch.in_flight.fetch_sub(1);
}

// Lets MXNet know that the arrays are written by the operation, which may be over by now.
void push_writing(const OpPtr& op) {
  static constexpr Context kCpu{kDevCpu, 0};
  std::vector<NDArrayHandle> writes;
  for (const Array& array : op->sized->arrays()) writes.push_back(array.get());
  g_watch.in_flight.fetch_add(1);
  g_held.fetch_add(1);
  check(g_mx.MXEnginePushAsyncND(&run_writing, new OpPtr(op), &drop_writing, &kCpu, nullptr, 0,
                                 writes.data(), static_cast<int>(writes.size()), &kAsync,
                                 op->submission.priority, "polyhvd", false));
}

// Returns when what has waited for collectives that failed was skipped. Each array that was not
// written has an error that its first reader gets: those of one operation share theirs until here,
// and the first reader of any would take it from all.
void settle() {
  constexpr std::chrono::seconds kDeadline{10};
  constexpr std::chrono::seconds kHeldDeadline{2};  // others may wait for ranks, and go on
  constexpr int kRounds = 8;  // of those that wait for one another: cast, copy, update
  const Clock::time_point deadline = Clock::now() + kDeadline;
  for (auto failed = g_failures.take_unsettled(); !failed.empty();
       failed = g_failures.take_unsettled()) {
    std::vector<Fence> fences;
    fences.reserve(failed.size());
    for (const auto& [array, error] : failed) fences.emplace_back(array.get(), error);
    for (const Fence& fence : fences) await(deadline, [&] { return fence.is_over(); });
    await(Clock::now() + kHeldDeadline, [] { return g_held.load() == 0; });
    for (int round = 0; round < kRounds; ++round) {
      const Fence fence;
      await(deadline, [&] { return fence.is_over(); });
    }
    g_watch.unsettled.fetch_sub(static_cast<std::int64_t>(failed.size()));
  }
}

// As a std::runtime_error of MXNet's C++ library: a wheel has another one inside, which MXNet's
// code would not catch.
[[noreturn]] void throw_to_mxnet(const char* text) {
  constexpr char kThrow[] = "_ZSt21__throw_runtime_errorPKc";
  if (const auto raise = reinterpret_cast<void (*)(const char*)>(dlsym(g_library, kThrow))) {
    raise(text);
  }
  throw std::runtime_error(text);
}

// For all waits of MXNet's own code: an error goes out as it does to Python, after all that
// depends on it has been skipped. To one reader: the others that wait for it are notified, too.
void wait_for_variable(void* engine, void* variable) {
  constexpr std::chrono::seconds kDeadline{20};  // whoever holds it may wait for this thread
  const auto self = static_cast<std::int64_t>(pthread_self());
  const std::int64_t pusher = g_watch.pusher.load();
  // Nothing can be in flight that this thread reads, nor can another one take the same error out.
  if (g_watch.in_flight.load() == 0 && g_watch.unsettled.load() == 0 &&
      g_watch.failures.load() == g_watch.forgiven.load() && (pusher == 0 || pusher == self)) {
    return WaitsGuard::original(engine, variable);
  }
  const Fence fence(Variable{variable});
  fence.wait();
  if (fence.has_run()) return;
  const std::unique_lock lock(g_updates, kDeadline);
  settle();
  WaitsGuard::original(engine, variable);
  const auto [code, text] = g_failures.last();
  if (code != 0) throw_to_mxnet(text.c_str());
}

}  // namespace
}  // namespace polyhvd::mxnet

using namespace polyhvd;
using namespace polyhvd::mxnet;

// Finds MXNet's functions in the library at `path`, which the process has loaded.
// Returns null, or what is missing.
POLYHVD_EXPORT const char* polyhvd_mxnet_load(const char* path) {
  void* library = dlopen(path, RTLD_NOLOAD | RTLD_NOW);
  if (library == nullptr) return "libmxnet.so";
#define POLYHVD_RESOLVE(name, result, arguments)                            \
  g_mx.name = reinterpret_cast<decltype(g_mx.name)>(dlsym(library, #name)); \
  if (g_mx.name == nullptr) return #name;
  POLYHVD_MXNET_FUNCTIONS(POLYHVD_RESOLVE)
#undef POLYHVD_RESOLVE
  g_mx.reorder_async = reinterpret_cast<void (*)(NDArrayHandle)>(dlsym(library, kReorderAsync));
  g_mx.in_onednn_layout = reinterpret_cast<bool (*)(const void*)>(dlsym(library, kInOnednnLayout));
  g_mx.reorder = reinterpret_cast<void (*)(void*)>(dlsym(library, kReorder));
  if (g_mx.reorder_async != nullptr && g_mx.in_onednn_layout == nullptr) return kInOnednnLayout;
  if (g_mx.reorder_async != nullptr && g_mx.reorder == nullptr) return kReorder;
  g_library = library;
  (void)ExceptionsLock::install(library);  // else failures are as unsafe as MXNet makes them
  return nullptr;
}

// The version that the core checks before it returns a table.
POLYHVD_EXPORT std::uint32_t polyhvd_mxnet_api_version() { return POLYHVD_C_API_VERSION; }

// The table of the engine that is current, or null when there is none. Returns when no
// submission goes through the former one any more. 0 for a table of another version than this
// library; then there is no engine.
POLYHVD_EXPORT int polyhvd_mxnet_set_engine(const polyhvd_engine_api* api) {
  return g_slot.set(api) ? 1 : 0;
}

// The part of a call besides its name and arrays.
struct polyhvd_mxnet_manner {
  std::int32_t kind;
  std::int32_t op;
  std::int32_t root;
  std::uint32_t process_set;
  double prescale;
  double postscale;
  std::uint64_t generation;  // of the engine that it belongs to; 0: the one that is current
};

// Pushes a collective into MXNet's engine and returns a handle; or null, with the
// reason in polyhvd_mxnet_failure(). `turn`: see c_api.h; a call without a name was counted
// when the program made it, since the engine may run it much later. `outputs` that are `inputs`: in
// place. With NaiveEngine the operation is over by then, and its failure is returned as well: that
// engine does not report it. No `outputs`: they are made when the ranks have agreed on their sizes,
// and had by polyhvd_mxnet_await_sizes() and polyhvd_mxnet_take().
POLYHVD_EXPORT void* polyhvd_mxnet_push(const polyhvd_mxnet_manner* manner, const char* name,
                                        std::uint64_t turn, const char* where, int priority,
                                        int count, const NDArrayHandle* inputs,
                                        const NDArrayHandle* outputs, const std::int64_t* numbers,
                                        int number_count) {
  const auto fail = [&](int code, const std::string& text) {
    t_failure_code = code;
    t_failure = text;
    return nullptr;
  };
  try {
    auto op = std::make_shared<Op>();
    op->name = name;
    op->line = std::to_string(manner->process_set) + '/' + op->name;
    op->where = where;
    polyhvd_submission& s = op->submission;
    s.size = sizeof s;
    s.name = op->name.c_str();
    s.where = op->where.c_str();
    s.kind = manner->kind;
    s.op = manner->op;
    s.root = manner->root;
    s.priority = priority;
    s.prescale = manner->prescale;
    s.postscale = manner->postscale;
    s.process_set = manner->process_set;
    s.count = count;
    const bool has_members = static_cast<OpKind>(s.kind) == OpKind::kAllgather && number_count == 1;
    if (has_members) op->members = numbers[0];
    if (!has_members) op->numbers.assign(numbers, numbers + number_count);
    if (!op->numbers.empty()) s.numbers = op->numbers.data();
    s.number_count = static_cast<std::int32_t>(op->numbers.size());
    s.turn = turn;
    s.queue_duplicates = 1;
    s.done = &on_done;
    take_inputs(*op, {inputs, static_cast<std::size_t>(count)});
    if (outputs == nullptr) op->sized = std::make_unique<SizedOutputs>(op->inputs.size());
    if (outputs != nullptr && outputs != inputs) {
      take_outputs(*op, {outputs, static_cast<std::size_t>(count)});
    }
    // MXNet's engine exists by now, and was chosen by whoever made the first array.
    static const bool guarded = WaitsGuard::install(g_library, &wait_for_variable);
    (void)guarded;  // else its own waits are as unsafe as MXNet makes them
    {
      const EngineSlot::Visit visit(g_slot);
      if (visit.api() == nullptr) throw Failure(ErrorCode::kShutdown, "there is no engine");
      op->generation = manner->generation != 0 ? manner->generation : visit.api()->generation;
    }
    if (g_failures.has_ended(op->generation)) {
      const auto [code, text] = g_failures.end();
      return fail(code, about(*op) + "the job has failed before: " + text);
    }
    push(op);
    if (g_kind.load() == Kind::kNaive && op->error_code != 0)
      return fail(op->error_code, op->error);
    return new OpPtr(std::move(op));
  } catch (const Failure& failure) {
    return fail(static_cast<int>(failure.error().code), about(manner->kind, name) + failure.what());
  } catch (const std::exception& error) {
    return fail(static_cast<int>(ErrorCode::kInternal), about(manner->kind, name) + error.what());
  }
}

// Waits until the sizes of outputs are known, so long at most. 0: not yet; 1: they are; 2: the
// operation has failed, see polyhvd_mxnet_error().
POLYHVD_EXPORT int polyhvd_mxnet_await_sizes(const void* handle, double seconds) {
  Op& op = **static_cast<const OpPtr*>(handle);
  return static_cast<int>(op.sized->await(std::chrono::duration<double>(seconds)));
}

// The outputs, once their sizes are known, as handles that the caller frees; and what the core
// reports of the sizes, see c_api.h, which lasts as long as `handle`. 0: the operation has
// failed meanwhile, or MXNet has.
POLYHVD_EXPORT int polyhvd_mxnet_take(const void* handle, NDArrayHandle* outputs,
                                      const std::int64_t** rows) {
  const OpPtr& op = *static_cast<const OpPtr*>(handle);
  if (!op->sized->take()) return 0;
  push_writing(op);
  for (const Array& array : op->sized->arrays()) {
    if (g_mx.MXShallowCopyNDArray(array.get(), outputs++) != 0) return 0;
  }
  *rows = op->sized->rows().data();
  return 1;
}

// Why the last polyhvd_mxnet_push() of this thread returned null: an error code and its text,
// which lasts until the thread's next call.
POLYHVD_EXPORT int polyhvd_mxnet_failure(const char** message) {
  *message = t_failure.c_str();
  return t_failure_code;
}

// Whether the operation is over and all went well: nothing is left to be waited for or asked.
POLYHVD_EXPORT int polyhvd_mxnet_succeeded(const void* handle) {
  const Op& op = **static_cast<const OpPtr*>(handle);
  return op.finished.load(std::memory_order_acquire) && op.has_run && op.error_code == 0 ? 1 : 0;
}

// Whether the operation is over: a read of its results returns at once.
POLYHVD_EXPORT int polyhvd_mxnet_finished(const void* handle) {
  return (*static_cast<const OpPtr*>(handle))->finished.load(std::memory_order_acquire) ? 1 : 0;
}

// How an operation has failed by now: its error code, 0 for not, and the text. One that MXNet
// skipped has the code of what was the cause, as far as we know it, and 100 more.
POLYHVD_EXPORT int polyhvd_mxnet_error(const void* handle, const char** message) {
  const Op& op = **static_cast<const OpPtr*>(handle);
  const int code = op.error_code.load();
  *message = op.error.c_str();
  return op.was_skipped && code != 0 ? kSkipped + code : code;
}

// Gives a handle back; the operation goes on.
POLYHVD_EXPORT void polyhvd_mxnet_release(void* handle) { delete static_cast<OpPtr*>(handle); }

// Numbers to look at, at any time; see Watch.
POLYHVD_EXPORT const std::int64_t* polyhvd_mxnet_watch() {
  return reinterpret_cast<const std::int64_t*>(&g_watch);
}

// Waits until the array can be read, as MXNet's own wait does, and copies its `size` elements to
// `data`, if that is not null. Returns 0; 1 if the array holds an error, which stays there; 2 if
// it cannot be copied so.
POLYHVD_EXPORT int polyhvd_mxnet_read(NDArrayHandle array, void* data, std::size_t size) {
  if (chunk_of(array) == nullptr) return data == nullptr ? 0 : 2;
  const Fence fence(array, data, size);
  fence.wait();
  if (!fence.has_run()) return 1;
  return data == nullptr || fence.has_copied() ? 0 : 2;
}

// See g_updates.
POLYHVD_EXPORT void polyhvd_mxnet_lock() { g_updates.lock(); }
POLYHVD_EXPORT void polyhvd_mxnet_unlock() { g_updates.unlock(); }

// See settle().
POLYHVD_EXPORT void polyhvd_mxnet_settle() { settle(); }

// Whether MXNet's engine has done with all collectives within so many seconds.
POLYHVD_EXPORT int polyhvd_mxnet_drain(double seconds) {
  const auto time =
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  return await(Clock::now() + time, [] { return g_watch.in_flight.load() == 0; }) ? 1 : 0;
}

// The failure that a message of MXNet is about: its code, 0 for none, and its text, which lasts
// until the thread's next call.
POLYHVD_EXPORT int polyhvd_mxnet_failure_in(const char* message, const char** text) {
  const auto [code, own] = g_failures.find(message);
  t_failure = own;
  *text = t_failure.c_str();
  return code;
}

// In a forked child, which has none of the threads that would end what is in flight.
POLYHVD_EXPORT void polyhvd_mxnet_forget() {
  g_watch.in_flight.store(0);
  g_held.store(0);
  new (&g_updates) std::recursive_timed_mutex;
  ExceptionsLock::forget();
}
