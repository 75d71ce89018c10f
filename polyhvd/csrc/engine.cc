#include "engine.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace polyhvd {
namespace {

// The engine that the current thread drives, so that a callback may wait.
thread_local const Engine* t_driving = nullptr;

constexpr auto kInterruptInterval = std::chrono::milliseconds(50);
constexpr auto kStallInterval = std::chrono::seconds(1);
constexpr auto kTurnInterval = std::chrono::milliseconds(100);
constexpr auto kDozeTime = std::chrono::milliseconds(1000);
constexpr int kIdleYields = 20;

std::size_t bytes_of(const Shape& shape, DType dtype) {
  return static_cast<std::size_t>(element_count(shape)) * item_size(dtype);
}

Segment segment_of(const TensorView& tensor) {
  return {static_cast<std::byte*>(tensor.data), bytes_of(tensor.shape, tensor.dtype)};
}

// The rows of a reducescatter that `member` keeps, where they lie in the input.
Segment part_of(const TensorView& input, int member, int members) {
  const std::int64_t rows = input.shape[0];
  Shape shape = input.shape;
  shape[0] = 1;
  const std::size_t row_bytes = bytes_of(shape, input.dtype);
  std::int64_t first = 0;
  for (int m = 0; m < member; ++m) first += rows_kept(rows, m, members);
  return {static_cast<std::byte*>(input.data) + static_cast<std::size_t>(first) * row_bytes,
          static_cast<std::size_t>(rows_kept(rows, member, members)) * row_bytes};
}

// One after the other when there are several: a group may have tensors of each.
template <class Use>
void for_each_dtype(const Request& request, Use&& use) {
  if (request.dtypes.empty()) return use(request.dtype);
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    if (std::ranges::count(request.dtypes, dtype) > 0) use(dtype);
  }
}

Error error_for(const Submission& submission, const Error& cause) {
  return {cause.code,
          std::string(name_of(submission.kind)) + " '" + submission.name + "': " + cause.message};
}

}  // namespace

Engine::Engine(int rank, ProcessSets sets, std::unique_ptr<Parking> parking, EngineParts parts,
               EngineOptions options, std::function<void()>& overlap)
    : rank_(rank),
      sets_(std::move(sets)),
      options_(std::move(options)),
      queue_(sets_, rank),
      parking_(std::move(parking)),
      parts_(std::move(parts)) {
  controller_ = std::make_unique<Controller>(rank_, sets_, queue_, options_.coordinator,
                                             std::move(parts_.parent), std::move(parts_.children));
  for (const ProcessSetId set : sets_.ids()) connect(set);
  parking_->set_crowded(options_.crowded);
  parking_->set_on_slow([this] { on_slow(); });
  overlap = [this] { controller_->progress(); };
  thread_ = std::thread([this] { run(); });
}

void Engine::connect(ProcessSetId set) {
  if (!sets_.position(set, rank_)) return;
  for (std::size_t b = 0; b < parts_.backends.size(); ++b) {
    communicators_[{b, set}] = parts_.backends[b]->connect(set, sets_.members(set));
  }
}

Engine::~Engine() {
  if (!abandoned_.load()) shutdown();
}

// Submitting ------------------------------------------------------------------

Backend& Engine::backend_for(const Submission& s) const {
  const Device device = s.inputs.empty() ? Device{} : s.inputs[0].device;
  const ReduceOp op = s.op == ReduceOp::kAverage ? ReduceOp::kSum : s.op;
  DType dtype = DType::kUint8;
  for (const auto& backend : parts_.backends) {
    const auto takes = [&](const TensorView& tensor) {
      dtype = tensor.dtype;
      return backend->supports(s.kind, dtype, op, device.kind);
    };
    if (std::ranges::all_of(s.inputs, takes)) return *backend;
  }
  throw Failure(ErrorCode::kInvalidArgument,
                std::string(name_of(s.kind)) + " '" + s.name + "': no backend does " +
                    std::string(name_of(s.op)) + " of " + std::string(name_of(dtype)) +
                    (device.kind == DeviceKind::kCuda ? " on a GPU" : "") +
                    "; cast the tensor or choose another operation");
}

OperationPtr Engine::submit(Submission submission, bool blocking,
                            const std::function<std::string()>& where) {
  const auto is_bool = [](const TensorView& tensor) { return tensor.dtype == DType::kBool; };
  if (submission.op == ReduceOp::kAverage && reduces(submission.kind) &&
      std::ranges::any_of(submission.inputs, is_bool)) {
    throw Failure(ErrorCode::kInvalidArgument,
                  std::string(name_of(submission.kind)) + " '" + submission.name +
                      "': the average of bool is not defined; cast it, or use Min or Max");
  }
  backend_for(submission);
  OperationPtr operation = queue_.submit(std::move(submission), where);
  operations_.fetch_add(1, std::memory_order_relaxed);
  if (!blocking) parking_->wake_if_asleep();
  return operation;
}

// Waiting and driving ---------------------------------------------------------

bool Engine::take_role() noexcept {
  bool free = false;
  if (!role_taken_.compare_exchange_strong(free, true)) return false;
  t_driving = this;
  parking_->sleep_flag().store(Parking::kAwake, std::memory_order_relaxed);
  return true;
}

void Engine::release_role() noexcept {
  // Peers ring from here on; then one last look at what they may have sent before.
  if (engine_dozes_.load() && !failed_) {
    parking_->sleep_flag().store(queue_.pending() > 0 ? Parking::kWaiting : Parking::kDozing);
    try {
      while (progress()) {
      }
    } catch (const Failure& failure) {
      fail(failure.error());
    }
  }
  t_driving = nullptr;
  role_taken_.store(false);
  if (waiters_.load() > 0) notify_waiters();
}

void Engine::notify_waiters() noexcept {
  std::lock_guard lock(turn_mutex_);
  turn_.notify_all();
}

void Engine::await_turn(const std::function<bool()>& done) {
  waiters_.fetch_add(1);
  {
    std::unique_lock lock(turn_mutex_);
    turn_.wait_for(lock, kTurnInterval, [&] { return done() || !role_taken_.load(); });
  }
  waiters_.fetch_sub(1);
}

void Engine::wait(const OperationPtr& operation, const std::function<bool()>& interrupted) {
  const auto done = [&] { return operation->is_finished(); };
  while (!done()) {
    if (t_driving == this) {  // from a callback of our own
      drive(done);
    } else if (take_role()) {
      interrupted_ = &interrupted;
      try {
        drive(done);
      } catch (...) {
        interrupted_ = nullptr;
        release_role();
        throw;
      }
      interrupted_ = nullptr;
      release_role();
    } else {
      await_turn(done);
      if (!done() && interrupted && interrupted()) {
        throw Failure(ErrorCode::kInterrupted, "interrupted");
      }
    }
  }
  if (operation->error) throw Failure(*operation->error);
}

// Negotiates and executes until `until` holds. Throws Failure(kInterrupted) only.
void Engine::drive(const std::function<bool()>& until) {
  try {
    parking_->await(
        [&] {
          progress();
          return until();
        },
        Parking::kForever);
  } catch (const Failure& failure) {
    const bool interrupted = failure.error().code == ErrorCode::kInterrupted;
    if (interrupted && !executing_) throw;
    if (interrupted) {
      fail({ErrorCode::kInterrupted,
            "rank " + std::to_string(rank_) + " was interrupted in the middle of a transfer"});
      throw;
    }
    fail(failure.error());
  }
}

bool Engine::progress() {
  if (failed_) return false;
  bool moved = controller_->progress();
  while (!failed_ && controller_->has_work()) {
    Work work = controller_->take_work();
    execute(work);
    moved = true;
  }
  if (!failed_ && !executing_ && controller_->farewell()) throw Failure(*controller_->farewell());
  return moved;
}

void Engine::check_health() {
  if (const auto reason = parts_.liveness->abort_reason()) throw Failure(*reason);
  check_stalls();
}

void Engine::on_slow() {
  if (failed_) return;
  check_health();
  if (executing_) controller_->progress();
  controller_->nudge();
  const auto now = Clock::now();
  if (now >= next_interrupt_check_) {
    next_interrupt_check_ = now + kInterruptInterval;
    if (interrupted_ != nullptr && *interrupted_ && (*interrupted_)()) {
      throw Failure(ErrorCode::kInterrupted, "interrupted");
    }
  }
}

// Executing -------------------------------------------------------------------

Communicator& Engine::communicator_for(const Work& work) {
  const Backend* chosen = &backend_for(work.operations[0]->submission);
  for (std::size_t b = 0; b < parts_.backends.size(); ++b) {
    if (parts_.backends[b].get() == chosen) return *communicators_.at({b, work.process_set});
  }
  throw Failure(ErrorCode::kInternal, "no communicator");
}

void Engine::execute(Work& work) {
  if (!work.error) {
    batches_.fetch_add(1, std::memory_order_relaxed);
    Operation& first = *work.operations[0];
    executing_ = true;
    const Deadline deadline =
        Clock::now() + std::chrono::duration_cast<Clock::duration>(options_.data_timeout);
    try {
      Communicator& communicator = communicator_for(work);
      switch (first.submission.kind) {
        case OpKind::kAllreduce:
          execute_allreduce(work, communicator, deadline);
          break;
        case OpKind::kAllgather:
          execute_allgather(first, communicator, deadline);
          break;
        case OpKind::kBroadcast:
          execute_broadcast(first, communicator, deadline);
          break;
        case OpKind::kReducescatter:
          execute_reducescatter(first, communicator, deadline);
          break;
        case OpKind::kAlltoall:
          execute_alltoall(first, communicator, deadline);
          break;
        case OpKind::kBarrier:
          break;  // to have agreed is all
        case OpKind::kJoin:
          if (first.submission.allocate) tell_number(first);
          break;
        case OpKind::kAddProcessSet:
          connect(static_cast<ProcessSetId>(first.number));
          break;
        case OpKind::kRemoveProcessSet:
          disconnect(static_cast<ProcessSetId>(first.submission.root));
          break;
      }
    } catch (const Failure& failure) {
      // A wait that was given up leaves executing_ set: see drive().
      if (failure.error().code != ErrorCode::kInterrupted) executing_ = false;
      throw;
    }
    executing_ = false;
  }
  for (const OperationPtr& operation : work.operations) complete(operation, work.error);
}

TensorView Engine::output_of(Operation& operation, std::size_t index, const Shape& shape) {
  const Submission& s = operation.submission;
  const DType dtype = s.inputs[index].dtype;
  if (s.outputs.empty()) return allocate(operation, index, shape, dtype);
  if (s.outputs[index].shape != shape || s.outputs[index].dtype != dtype) {
    throw Failure(ErrorCode::kInternal,
                  "the output given for '" + s.name + "' has not the agreed shape");
  }
  return s.outputs[index];
}

TensorView Engine::allocate(Operation& operation, std::size_t index, const Shape& shape,
                            DType dtype) {
  const Submission& s = operation.submission;
  if (s.allocate) {
    void* data = s.allocate(static_cast<int>(index), shape);
    if (data == nullptr && bytes_of(shape, dtype) > 0) {
      throw Failure(ErrorCode::kInternal, "no memory for the output of '" + s.name + "'");
    }
    return {data, shape, dtype, s.inputs.empty() ? Device{} : s.inputs[0].device};
  }
  operation.buffers.push_back(std::make_shared<OwnedBuffer>(shape, dtype, bytes_of(shape, dtype)));
  return {operation.buffers.back()->data(), shape, dtype, s.inputs[0].device};
}

void Engine::tell_number(Operation& operation) {
  const auto number = static_cast<std::int32_t>(operation.number);
  std::memcpy(allocate(operation, 0, {}, DType::kInt32).data, &number, sizeof number);
}

void Engine::execute_allreduce(Work& work, Communicator& communicator, Deadline deadline) {
  reduced_.clear();
  for (const OperationPtr& operation : work.operations) {
    const Submission& s = operation->submission;
    for (std::size_t i = 0; i < s.inputs.size(); ++i) {
      reduced_.push_back(segment_of(output_of(*operation, i, s.inputs[i].shape)));
    }
  }
  const Operation& first = *work.operations[0];
  for_each_dtype(first.request, [&](DType dtype) {
    in_.clear();
    out_.clear();
    auto out = reduced_.begin();
    for (const OperationPtr& operation : work.operations) {
      for (const TensorView& input : operation->submission.inputs) {
        const Segment& output = *out++;
        if (input.dtype != dtype) continue;
        in_.push_back(segment_of(input));
        out_.push_back(output);
      }
    }
    communicator.allreduce(in_, out_, dtype, first.submission.op, first.submission.scale, deadline);
  });
}

void Engine::execute_allgather(Operation& operation, Communicator& communicator,
                               Deadline deadline) {
  const Submission& s = operation.submission;
  const std::size_t tensors = s.inputs.size();
  const std::size_t members = sets_.members(s.process_set).size();
  for (std::size_t i = 0; i < tensors; ++i) {
    Shape row = s.inputs[i].shape;
    row[0] = 1;
    const std::size_t row_bytes = bytes_of(row, s.inputs[i].dtype);
    std::vector<std::size_t> counts(members);
    Shape shape = s.inputs[i].shape;
    shape[0] = 0;
    for (std::size_t m = 0; m < members; ++m) {
      const std::int64_t rows = operation.rows[m * tensors + i];
      shape[0] += rows;
      counts[m] = static_cast<std::size_t>(rows) * row_bytes;
    }
    const TensorView out = output_of(operation, i, shape);
    const Segment in = segment_of(s.inputs[i]);
    const Segment all = segment_of(out);
    communicator.allgather({in.data, in.bytes}, {all.data, all.bytes}, counts, deadline);
  }
}

void Engine::execute_broadcast(Operation& operation, Communicator& communicator,
                               Deadline deadline) {
  const Submission& s = operation.submission;
  in_.clear();
  out_.clear();
  for (std::size_t i = 0; i < s.inputs.size(); ++i) {
    in_.push_back(segment_of(s.inputs[i]));
    out_.push_back(segment_of(output_of(operation, i, s.inputs[i].shape)));
  }
  const int root = *position_in(sets_.members(s.process_set), s.root);
  communicator.broadcast(in_, out_, root, deadline);
}

void Engine::execute_reducescatter(Operation& operation, Communicator& communicator,
                                   Deadline deadline) {
  const Submission& s = operation.submission;
  const auto members = static_cast<int>(sets_.members(s.process_set).size());
  reduced_.clear();
  for (std::size_t i = 0; i < s.inputs.size(); ++i) {
    Shape shape = s.inputs[i].shape;
    shape[0] = rows_kept(shape[0], operation.position, members);
    reduced_.push_back(segment_of(output_of(operation, i, shape)));
  }
  for_each_dtype(operation.request, [&](DType dtype) {
    in_.clear();
    out_.clear();
    std::vector<std::size_t> counts(static_cast<std::size_t>(members), 0);
    for (int m = 0; m < members; ++m) {
      for (const TensorView& input : s.inputs) {
        if (input.dtype != dtype) continue;
        const Segment part = part_of(input, m, members);
        counts[static_cast<std::size_t>(m)] += part.bytes;
        in_.push_back(part);
      }
    }
    for (std::size_t i = 0; i < s.inputs.size(); ++i) {
      if (s.inputs[i].dtype == dtype) out_.push_back(reduced_[i]);
    }
    communicator.reducescatter(in_, out_, counts, dtype, s.op, s.scale, deadline);
  });
}

// How many rows go where changes from call to call, so it is not negotiated: it
// travels with the data.
void Engine::execute_alltoall(Operation& operation, Communicator& communicator,
                              Deadline deadline) {
  const Submission& s = operation.submission;
  const TensorView& input = s.inputs[0];
  const std::size_t members = sets_.members(s.process_set).size();
  const auto self = static_cast<std::size_t>(operation.position);
  std::vector<std::int64_t> splits = s.numbers;
  splits.resize(members, s.numbers.empty() ? input.shape[0] / static_cast<std::int64_t>(members) : 0);
  std::vector<std::int64_t> rows(members * members);
  const std::vector<std::size_t> row_of_table(members, members * sizeof(std::int64_t));
  communicator.allgather(std::as_bytes(std::span(splits)), std::as_writable_bytes(std::span(rows)),
                         row_of_table, deadline);

  Shape shape = input.shape;
  shape[0] = 1;
  const std::size_t row_bytes = bytes_of(shape, input.dtype);
  std::vector<std::size_t> counts(rows.size());
  std::vector<std::int32_t> received(members);
  shape[0] = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    counts[i] = static_cast<std::size_t>(rows[i]) * row_bytes;
    if (i % members != self) continue;
    received[i / members] = static_cast<std::int32_t>(rows[i]);
    shape[0] += rows[i];
  }
  const Segment out = segment_of(allocate(operation, 0, shape, input.dtype));
  const Segment in = segment_of(input);
  communicator.alltoall({in.data, in.bytes}, {out.data, out.bytes}, counts, deadline);
  const Shape one_each{static_cast<std::int64_t>(members)};
  const TensorView table = allocate(operation, 1, one_each, DType::kInt32);
  std::memcpy(table.data, received.data(), members * sizeof(std::int32_t));
}

void Engine::disconnect(ProcessSetId set) {
  std::erase_if(communicators_, [set](const auto& item) { return item.first.second == set; });
}

void Engine::complete(const OperationPtr& operation, std::optional<Error> error) {
  if (!operation->stands_in) queue_.retire(operation);
  operation->error = std::move(error);
  // Moved out first: once finished, the caller may drop the operation.
  const auto done = std::move(operation->submission.done);
  const std::optional<Error> told = operation->error;
  operation->finish();
  if (waiters_.load() > 0) notify_waiters();
  if (done) done(told ? &*told : nullptr);
}

// Ending ----------------------------------------------------------------------

void Engine::fail(const Error& error) noexcept {
  if (failed_) return;
  failed_ = true;
  executing_ = false;
  // A farewell concerns whoever hears it: others may still run what was agreed.
  const bool heard = controller_->farewell() && error.code == ErrorCode::kPeerDeparted;
  if (!heard) {
    parts_.liveness->spread_abort(error);
    controller_->post_abort(error);
  }
  parking_->unwatch_all();
  for (const OperationPtr& operation : queue_.close(error)) {
    complete(operation, error_for(operation->submission, error));
  }
}

void Engine::abort(const std::string& reason) {
  while (!take_role()) {
    if (stopping_.load()) return;
    await_turn([] { return false; });
  }
  fail({ErrorCode::kPeerLost, "rank " + std::to_string(rank_) + " ended the job: " + reason});
  release_role();
}

void Engine::shutdown() {
  std::lock_guard once(shutdown_mutex_);
  if (shut_down_) return;
  shut_down_ = true;
  while (!take_role()) await_turn([] { return false; });
  // The role is kept for good: nobody drives a closed engine.
  try {
    while (!failed_ && progress()) {
    }
  } catch (const Failure& failure) {
    fail(failure.error());
  }
  if (!failed_ && queue_.has_announced()) {
    const Error left{ErrorCode::kPeerDeparted, "rank " + std::to_string(rank_) +
                                                   " has shut down while operations were pending"};
    parts_.liveness->spread_abort(left);
    controller_->post_abort(left);
  } else if (!failed_) {
    controller_->depart();
  }
  const Error shut{ErrorCode::kShutdown, "the engine was shut down"};
  for (const OperationPtr& operation : queue_.close(shut)) {
    complete(operation, error_for(operation->submission, shut));
  }
  failed_ = true;
  parts_.liveness->leave();
  stopping_.store(true);
  parking_->wake();
  notify_waiters();
  thread_.join();
  communicators_.clear();
  controller_.reset();
  parts_.liveness->close();
  t_driving = nullptr;
}

void Engine::abandon() noexcept {
  abandoned_.store(true);
  for (const int fd : parts_.liveness->descriptors()) close(fd);
}

// The engine's thread ---------------------------------------------------------

void Engine::run() {
  while (!stopping_.load()) {
    if (!take_role()) {
      await_turn([this] { return stopping_.load(); });
      continue;
    }
    if (stopping_.load()) {
      release_role();
      return;
    }
    try {
      if (!failed_) {
        parking_->poll_now();
        while (progress() || !idle_for_long()) {
        }
        check_health();
      }
    } catch (const Failure& failure) {
      fail(failure.error());
    }
    doze();
  }
}

// Whether nothing happens for a while: an answer may be on its way.
bool Engine::idle_for_long() {
  if (queue_.pending() == 0) return true;
  for (int i = 0; i < kIdleYields; ++i) {
    if (waiters_.load() > 0 || progress()) return waiters_.load() > 0;
    sched_yield();
  }
  return true;
}

// Releases the role and sleeps until there is something to do.
void Engine::doze() {
  parking_->announce_sleep();
  engine_dozes_.store(true);
  if (sets_.ids().size() > 1) controller_->nudge();
  release_role();
  if (!stopping_.load() && !queue_.has_news()) parking_->doze(kDozeTime);
  engine_dozes_.store(false);
  parking_->end_sleep();
  engine_wakes_.fetch_add(1, std::memory_order_relaxed);
  gather();
}

// Lets work gather as long as it keeps arriving, and no longer than a cycle.
void Engine::gather() const {
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(options_.cycle_time);
  std::uint64_t seen = queue_.submitted();
  while (queue_.has_news() && waiters_.load() == 0 && Clock::now() < end) {
    sched_yield();
    sched_yield();
    const std::uint64_t now = queue_.submitted();
    if (now == seen) return;
    seen = now;
  }
}

void Engine::check_stalls() {
  const auto now = Clock::now();
  if (now < next_stall_check_) return;
  next_stall_check_ = now + kStallInterval;
  const bool warns = options_.stall_warn.count() > 0;
  const bool ends = options_.stall_shutdown.count() > 0;
  if (!warns && !ends) return;
  const auto at_least = !warns  ? options_.stall_shutdown
                        : !ends ? options_.stall_warn
                                : std::min(options_.stall_warn, options_.stall_shutdown);
  const auto list = [](const std::vector<int>& ranks) {
    std::string text;
    for (const int rank : ranks) text += (text.empty() ? "" : ", ") + std::to_string(rank);
    return text;
  };
  std::string report;
  for (const Stalled& s : controller_->stalled(at_least)) {
    report += "\n  " + s.name + ": ranks " + list(s.ready_ranks) + " wait for ranks " +
              list(s.absent_ranks) + " since " + std::to_string(static_cast<long>(s.age.count())) +
              " s";
    if (ends && s.age > options_.stall_shutdown) {
      throw Failure(ErrorCode::kTimeout, "stalled for too long:" + report);
    }
  }
  if (!warns || report.empty() || now < next_stall_report_) return;
  next_stall_report_ = now + std::chrono::duration_cast<Clock::duration>(options_.stall_warn);
  options_.log("operations are waiting for ranks that have not asked for them:" + report);
}

std::map<std::string, std::uint64_t> Engine::counters() const {
  std::map<std::string, std::uint64_t> counters{
      {"operations", operations_.load()},
      {"batches", batches_.load()},
      {"cache_hits", queue_.cache_hits()},
      {"engine_wakes", engine_wakes_.load()},
      {"pending", static_cast<std::uint64_t>(queue_.pending())},
  };
  parts_.liveness->add_counters(counters);
  return counters;
}

}  // namespace polyhvd
