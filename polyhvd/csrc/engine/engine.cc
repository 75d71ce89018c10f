#include "engine/engine.h"

#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <new>
#include <string_view>

#include "control/disagreement.h"
#include "control/uneven.h"

namespace polyhvd {
namespace {

constexpr auto kInterruptInterval = std::chrono::milliseconds(50);
constexpr auto kFlightInterval = std::chrono::seconds(1);
constexpr auto kDozeTime = std::chrono::milliseconds(1000);
constexpr int kIdleYields = 100;
constexpr int kReportsMax = 64;
constexpr std::size_t kReportBytesMax = 512;

std::string text_of_farewell(const Departure& parent) {
  if (!parent.words.empty()) return text_of_failed(parent);
  return "rank " + std::to_string(parent.rank) + ", which coordinates others, has shut down";
}

}  // namespace

Engine::Engine(int rank, ProcessSets sets, std::unique_ptr<Parking> parking, EngineParts parts,
               EngineOptions options, std::function<void()>& overlap)
    : rank_(rank),
      sets_(std::move(sets)),
      options_(std::move(options)),
      queue_(sets_, rank),
      timeline_(queue_.recorder(), rank, options_.log),
      flight_(queue_.recorder(), rank, options_.flights, options_.log, options_.loss_log),
      report_(options_.report < 0 ? -1 : fcntl(options_.report, F_DUPFD_CLOEXEC, 0)),
      parking_(std::move(parking)),
      parts_(std::move(parts)),
      executor_(sets_, timeline_, *parking_, parts_.devices.get()),
      running_watch_(rank, options_.stalls, sets_, *parking_, *parts_.liveness, options_.log),
      tuner_({.fusion_bytes_max = options_.coordinator.fusion.bytes_max,
              .cycle_us = static_cast<std::uint32_t>(options_.cycle_time.count() * 1e6)},
             std::chrono::duration_cast<std::chrono::nanoseconds>(options_.cycle_time),
             rank == 0 ? options_.steps_per_sample : 0, options_.mailbox) {
  controller_ = std::make_unique<Controller>(rank_, sets_, queue_, options_.coordinator,
                                             std::move(parts_.parent), std::move(parts_.children));
  stall_watch_ =
      std::make_unique<StallWatch>(rank_, options_.stalls, *controller_, queue_, *parts_.liveness,
                                   options_.mailbox, [this](const std::string& text) {
                                     stalls_.fetch_add(1, std::memory_order_relaxed);
                                     options_.log(text);
                                   });
  if (options_.mailbox) {
    options_.mailbox->set_on_stacks([this] { parking_->wake_if_asleep(); });
  }
  for (const ProcessSetId set : sets_.ids()) connect(set);
  parking_->set_crowded(options_.crowded);
  parking_->set_on_slow([this] { on_slow(); });
  overlap = [this] { controller_->progress(); };
  thread_ = std::thread([this] { run(); });
}

void Engine::connect(ProcessSetId set) {
  if (!sets_.position(set, rank_)) return;
  const auto make = [&](std::size_t b, Communicator* on_cpu) {
    return parts_.backends[b]->connect(set, sets_.place(set), sets_.members(set), on_cpu);
  };
  auto on_cpu = make(parts_.on_cpu, nullptr);
  for (std::size_t b = 0; b < parts_.backends.size(); ++b) {
    if (b != parts_.on_cpu) communicators_[{b, set}] = make(b, on_cpu.get());
  }
  communicators_[{parts_.on_cpu, set}] = std::move(on_cpu);
}

Engine::~Engine() {
  if (!abandoned_.load()) shutdown();
}

// Submitting ------------------------------------------------------------------

Backend& Engine::backend_for(const Submission& s) const {
  const Device device = device_of(s);
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
                std::string(name_of(s.kind)) + " '" + s.name + "': no backend supports " +
                    std::string(name_of(s.op)) + " of " + std::string(name_of(dtype)) +
                    (device.kind == DeviceKind::kCuda ? " on a GPU" : "") +
                    "; cast the tensor or choose another operation");
}

void Engine::take_from_device(Submission& s) const {
  const Device device = s.inputs[0].device;
  const auto refuse = [&](const std::string& why) {
    throw Failure(ErrorCode::kInvalidArgument,
                  std::string(name_of(s.kind)) + " '" + s.name + "': " + why);
  };
  if (!parts_.devices) refuse("this job does not support tensors on GPUs; move them to the CPU");
  for (const auto* tensors : {&s.inputs, &s.outputs}) {
    for (const TensorView& tensor : *tensors) {
      if (tensor.device != device) refuse("its tensors are on several devices; move them to one");
    }
  }
  s.ready = s.event == nullptr ? parts_.devices->record(device, s.stream)
                               : parts_.devices->borrow(device, s.event);
}

OperationPtr Engine::run_behind(Submission submission,
                                const std::function<std::string()>& where) const {
  const auto operation = std::make_shared<Operation>(std::move(submission));
  Submission& s = operation->submission;
  const auto refuse = [&](const std::string& cure) {
    std::string place = s.where.empty() && where ? where() : s.where;
    if (!place.empty()) place.insert(0, " at ");
    throw Failure(ErrorCode::kInvalidArgument,
                  subject(s.kind, s.name) + place + ": rank " + std::to_string(rank_) +
                      " joined an elastic job that is running, and the other ranks are past this "
                      "call, inside elastic.run or elastic.train; " +
                      cure);
  };
  if (s.kind == OpKind::kAddProcessSet) refuse("pass the process set to init(process_sets=[...])");
  if (s.kind != OpKind::kBroadcast && s.kind != OpKind::kBarrier) {
    refuse("move the call into the elastic function, or keep its result in the state");
  }
  queue_.require_valid(s);
  for (std::size_t i = 0; i < s.inputs.size(); ++i) {
    const TensorView& from = s.inputs[i];
    const std::size_t bytes =
        static_cast<std::size_t>(element_count(from.shape)) * item_size(from.dtype);
    std::byte* to = nullptr;
    if (!s.outputs.empty()) {
      to = static_cast<std::byte*>(s.outputs[i].data);
    } else if (s.allocate) {
      to = static_cast<std::byte*>(s.allocate(static_cast<int>(i), from.shape));
    } else if (from.device.kind == DeviceKind::kCpu) {
      operation->buffers.push_back(std::make_shared<OwnedBuffer>(from.shape, from.dtype, bytes));
      to = operation->buffers.back()->data();
    }
    if (to == from.data || bytes == 0) continue;
    if (from.device.kind != DeviceKind::kCpu) refuse("broadcast a tensor on a GPU in place");
    if (to == nullptr) {
      throw Failure(ErrorCode::kInternal, "no memory for the output of '" + s.name + "'");
    }
    std::memcpy(to, from.data, bytes);
  }
  const auto done = std::move(s.done);
  operation->finish();
  if (done) done(nullptr);
  return operation;
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
  if (device_of(submission).kind != DeviceKind::kCpu) {
    take_from_device(submission);
  }
  backend_for(submission);
  if (is_behind()) return run_behind(std::move(submission), where);
  OperationPtr operation;
  try {
    if (parent_departed_.load(std::memory_order_acquire)) {
      throw Failure(error_for(submission, queue_.closed_by()));
    }
    operation = queue_.submit(std::move(submission), where);
  } catch (const Failure& failure) {
    throw Failure(shown(failure.error()));
  }
  operations_.fetch_add(1, std::memory_order_relaxed);
  if (!blocking) parking_->wake_if_asleep();
  return operation;
}

// Waiting and driving ---------------------------------------------------------

bool Engine::take_role() noexcept {
  if (!role_.take()) return false;
  parking_->stay_awake();
  return true;
}

void Engine::release_role() noexcept {
  // Peers wake us from here on; then one last look at what they may have sent before.
  if (role_.is_engine_asleep() && !failed_) {
    try {
      // Each time, since a transfer wakes up from its own sleep by itself.
      do {
        parking_->let_wake(queue_.pending() > 0 ? Parking::kWaiting : Parking::kDozing);
      } while (progress());
    } catch (const Failure& failure) {
      fail(cause_of(failure));
    }
  }
  role_.release();
}

void Engine::wait(const OperationPtr& operation, const std::function<bool()>& interrupted) {
  const auto done = [&] { return operation->is_finished(); };
  while (!done()) {
    if (role_.is_mine()) {  // from one of our callbacks
      drive(done);
    } else if (!role_.is_claimed() && take_role()) {
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
      role_.await(done);
      if (!done() && interrupted && interrupted()) {
        throw Failure(ErrorCode::kInterrupted, "interrupted");
      }
    }
  }
  if (operation->error) throw Failure(shown(*operation->error));
  tuner_.show_notice(operation->notice);
}

const Error& Engine::shown(const Error& error) noexcept {
  if (kind_of(error.code).is_consequence) has_lost_results_.store(true);
  return error;
}

// Negotiates and executes until `until` holds. Throws Failure(kInterrupted) only.
void Engine::drive(const std::function<bool()>& until) {
  try {
    parking_->await(
        [&] {
          progress();
          return until() || role_.is_claimed();
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
    fail(cause_of(failure));
  }
}

bool Engine::progress() {
  if (failed_) return false;
  if (tuner_.has_wish()) {
    if (const std::optional<Tuning> wish = tuner_.take_wish()) controller_->tune(*wish);
  }
  bool moved = controller_->progress();
  if (timeline_.on() && !failed_ && controller_->has_work()) timeline_.mark_cycle();
  while (!failed_ && controller_->has_work()) {
    Work work = controller_->take_work();
    execute(work);
    moved = true;
  }
  if (!failed_ && !executing_ && controller_->farewell()) {
    throw Failure(ErrorCode::kPeerDeparted, text_of_farewell(*controller_->farewell()));
  }
  return moved;
}

void Engine::check_health() {
  if (const auto reason = parts_.liveness->abort_reason()) throw Failure(*reason);
  if (abort_posted_.load()) {
    throw Failure(ErrorCode::kPeerLost, abort_reason_);
  }
  if (options_.mailbox) options_.mailbox->tick();
  stall_watch_->check(executing_);
  const auto now = Clock::now();
  if (running_watch_.check(now)) flight_.write("a running operation makes no progress");
  controller_->beat(now);
  for (const auto& [key, communicator] : communicators_) communicator->check();
  parts_.liveness->move_along(queue_.pending() > 0);
  check_flight(now);
}

// Every rank that waits notices a stall by itself, whatever becomes of the report.
void Engine::check_flight(Clock::time_point now) {
  if (now < next_flight_check_ || options_.stalls.warn.count() <= 0) return;
  next_flight_check_ = now + kFlightInterval;
  if (queue_.pending() > 0) flight_.check_stall(options_.stalls.warn);
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
  if (work.tuning) {
    adopt(*work.tuning);
    return;
  }
  executor_.begin();
  if (!work.error) {
    batches_.fetch_add(1, std::memory_order_relaxed);
    Operation& first = *work.operations[0];
    executing_ = true;
    const Clock::time_point begin = Clock::now();
    const Deadline deadline =
        begin + std::chrono::duration_cast<Clock::duration>(options_.data_timeout);
    const RunningWatch::Run run(running_watch_, work, begin);
    for (const Ticks now = ticks_now(); const OperationPtr& operation : work.operations) {
      queue_.recorder().on_start(*operation, now);
    }
    try {
      switch (first.submission.kind) {
        case OpKind::kAddProcessSet:
          connect(static_cast<ProcessSetId>(first.number));
          break;
        case OpKind::kRemoveProcessSet:
          disconnect(static_cast<ProcessSetId>(first.submission.root));
          break;
        default:
          executor_.run(work, communicator_for(work),
                        *communicators_.at({parts_.on_cpu, work.process_set}), deadline);
          break;
      }
    } catch (const Failure& failure) {
      // A wait that was given up leaves executing_ set: see drive().
      if (failure.error().code != ErrorCode::kInterrupted) executing_ = false;
      throw;
    } catch (const std::bad_alloc&) {
      executing_ = false;
      throw Failure(ErrorCode::kInternal,
                    concat({"no memory on rank ", std::to_string(rank_), " for ",
                            subject(first.submission.kind, first.submission.name),
                            "; send less at a time, or give the process more memory"}));
    }
    executing_ = false;
    if (tuner_.measures()) tuner_.measure(work);
    note_steps(work);
  }
  for (const OperationPtr& operation : work.operations) complete(operation, work.error);
}

void Engine::note_steps(const Work& work) noexcept {
  for (const Ticks now = ticks_now(); const OperationPtr& operation : work.operations) {
    const Submission& s = operation->submission;
    if (s.turn == 0) {
      steps_.note(std::hash<std::string_view>{}(s.name), now);
      continue;
    }
    // Calls without a name never come again by name, but others of their size do.
    std::size_t bytes = 0;
    for (const TensorView& tensor : s.inputs) {
      bytes += static_cast<std::size_t>(element_count(tensor.shape)) * item_size(tensor.dtype);
    }
    steps_.note(bytes * 64 + static_cast<std::size_t>(s.kind), now);
  }
}

void Engine::disconnect(ProcessSetId set) {
  // Others may stand on the one for CPUs.
  const auto on_cpu = std::pair(parts_.on_cpu, set);
  std::erase_if(communicators_,
                [&](const auto& item) { return item.first.second == set && item.first != on_cpu; });
  communicators_.erase(on_cpu);
  parts_.liveness->tell_removals(queue_.settle_removal());
}

void Engine::record_end(const Operation& operation, bool error) {
  const OpState refused = operation.agreed && !failed_ ? OpState::kRefused : OpState::kFailed;
  queue_.recorder().on_end(operation, error ? refused : OpState::kDone);
  if (timeline_.on()) timeline_.add(operation, executor_.transfer());
}

void Engine::complete(const OperationPtr& operation, std::optional<Error> error) {
  record_end(*operation, error.has_value());
  if (error) report(*error);
  if (!operation->stands_in) queue_.retire(operation);
  if (!error) stall_watch_->note_ran(operation->submission);
  if (!error && operation->submission.process_set == kWorld) {
    operation->notice = tuner_.sent_notice();
    if (operation->submission.done || operation->stands_in) tuner_.show_notice(operation->notice);
  }
  operation->error = std::move(error);
  // Moved out first: once finished, the caller may drop the operation.
  const auto done = std::move(operation->submission.done);
  const std::optional<Error> reported = operation->error;
  operation->finish();
  role_.notify();
  if (done) done(reported ? &shown(*reported) : nullptr);
}

// Reports an error that another rank has caused to the launcher. A framework may raise it as
// another exception, but with this message in its text.
void Engine::report(const Error& error) noexcept {
  if (!report_ || !kind_of(error.code).is_consequence || reports_ == kReportsMax) return;
  ++reports_;
  std::array<char, kReportBytesMax> line{};  // with its final zero
  error.message.copy(line.data(), line.size() - 1);
  // Does not wait for a full pipe, or one that is not read.
  if (write(report_.get(), line.data(), std::strlen(line.data()) + 1) < 0) reports_ = kReportsMax;
}

// Ending ----------------------------------------------------------------------

// A connection also breaks because the rank at its other end has failed over
// something else, and its message may have arrived already.
Error Engine::cause_of(const Failure& failure) noexcept {
  if (failure.error().code != ErrorCode::kPeerLost) return failure.error();
  return controller_->take_abort().value_or(failure.error());
}

// The error of an operation that the engine's end has failed.
Error Engine::error_for(const Submission& s, const Error& cause) const {
  std::string text = concat({subject(s.kind, s.name), ": ", cause.message});
  if (parent_departed_.load(std::memory_order_acquire) && is_uneven_ &&
      cause.code == ErrorCode::kPeerDeparted) {
    const RunCount runs = queue_.cache().runs_of(s.process_set, s.name);
    text += ":" + text_of_uneven(s.kind, s.name, runs, "it", std::array{rank_});
  }
  return {cause.code, std::move(text)};
}

void Engine::fail(const Error& error) noexcept {
  if (failed_) return;
  failed_ = true;
  executing_ = false;
  report(error);
  // A farewell concerns only its receiver: others may still run what was agreed.
  const bool is_farewell = controller_->farewell() && error.code == ErrorCode::kPeerDeparted;
  if (is_farewell) {
    queue_.expect_close(error);
    is_uneven_ = controller_->farewell()->words.empty();
    parent_departed_.store(true);  // with what closes the queue: see submit()
  } else {
    failure_is_posted_ = true;
    parts_.liveness->spread_abort(error);
    controller_->post_abort(error);
  }
  // A rank that leaves in good order is not a failure if this one waited for nothing.
  const bool is_failure = error.code != ErrorCode::kPeerDeparted || !queue_.in_flight().empty();
  std::string states = is_failure ? flight_.look(error.message) : std::string();
  executor_.begin();
  // A rank that leaves has begun the same work on its own GPU: to abort that would give this rank
  // wrong values without an error.
  for (const auto& [key, communicator] : communicators_) {
    if (error.code == ErrorCode::kPeerDeparted) communicator->finish();
    // Before the device lets go of the program, which may otherwise commit what it finds there.
    if (communicator->is_working()) has_lost_results_.store(true);
    communicator->abort();
  }
  parking_->unwatch_all();
  for (const OperationPtr& operation : queue_.close(error)) {
    complete(operation, error_for(operation->submission, error));
  }
  // No operation waits for a disk.
  flight_.put_down(std::move(states), kind_of(error.code).is_consequence);
}

void Engine::claim_role() {
  role_.claim();
  parking_->wake_if_asleep();
  while (!take_role()) role_.await([this] { return stopping_.load(); });
}

void Engine::abort(const std::string& reason) {
  const std::string text = "rank " + std::to_string(rank_) + " gave up: " + reason;
  if (!aborting_.exchange(true)) {
    abort_reason_ = text;
    abort_posted_.store(true);
  }
  role_.claim();
  parking_->wake_if_asleep();
  while (!take_role()) {
    if (stopping_.load()) return;
    role_.await([] { return false; });
  }
  fail({ErrorCode::kPeerLost, text});
  release_role();
}

void Engine::shutdown(std::string words) {
  words.resize(std::min(words.size(), kLastWordsBytesMax));
  std::lock_guard once(shutdown_mutex_);
  if (shut_down_) return;
  shut_down_ = true;
  claim_role();
  // The role is never released: a closed engine has no driver.
  try {
    while (!failed_ && progress()) {
    }
  } catch (const Failure& failure) {
    fail(cause_of(failure));
  }
  if (!failed_ && queue_.has_announced()) {
    const Error departed{ErrorCode::kPeerDeparted,
                         words.empty() ? "rank " + std::to_string(rank_) +
                                             " has shut down while operations were pending"
                                       : text_of_failed({rank_, words})};
    parts_.liveness->spread_abort(departed);
    controller_->post_abort(departed);
  } else if (!failed_) {
    controller_->depart(words);
  }
  const Error shut{ErrorCode::kShutdown, "the engine was shut down"};
  for (const OperationPtr& operation : queue_.close(shut)) {
    complete(operation, error_for(operation->submission, shut));
  }
  failed_ = true;
  if (!failure_is_posted_) parts_.liveness->leave();
  stopping_.store(true);
  parking_->wake();
  role_.notify();
  thread_.join();
  timeline_.stop();
  flight_.settle(FlightDump::kPatience);
  if (options_.mailbox) options_.mailbox->set_on_stacks({});
  communicators_.clear();
  stall_watch_.reset();
  controller_.reset();
  parts_.liveness->close();
  role_.retire();
}

void Engine::abandon() noexcept {
  abandoned_.store(true);
  for (const int fd : parts_.liveness->descriptors()) close(fd);
}

// The engine's thread ---------------------------------------------------------

void Engine::bind_to_core() const {
  if (options_.core < 0) return;
  cpu_set_t cores;
  CPU_ZERO(&cores);
  if (options_.core < CPU_SETSIZE) CPU_SET(static_cast<std::size_t>(options_.core), &cores);
  if (const int code = pthread_setaffinity_np(pthread_self(), sizeof cores, &cores); code != 0) {
    options_.log("the engine's thread cannot be bound to core " + std::to_string(options_.core) +
                 ": " + std::strerror(code) + "; see POLYHVD_THREAD_AFFINITY");
  }
}

void Engine::run() {
  bind_to_core();
  while (!stopping_.load()) {
    if (!take_role()) {
      role_.await([this] { return stopping_.load(); });
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
      fail(cause_of(failure));
    }
    doze();
  }
}

// Whether nothing happens for a while: an answer may be on its way.
bool Engine::idle_for_long() {
  if (queue_.pending() == 0) return true;
  for (int i = 0; i < kIdleYields; ++i) {
    if (role_.is_awaited() || progress()) return role_.is_awaited();
    sched_yield();
  }
  return true;
}

// Before the checks stop: a rank that is not a member of a set may have nothing pending itself.
void Engine::nudge_others() {
  if (sets_.ids().size() > 1) controller_->nudge();
}

// Releases the role and sleeps until there is something to do.
void Engine::doze() {
  parking_->announce_sleep();
  role_.set_engine_asleep(true);
  nudge_others();
  release_role();
  if (!stopping_.load() && !queue_.has_news()) parking_->doze(kDozeTime);
  role_.set_engine_asleep(false);
  parking_->end_sleep();
  engine_wakes_.fetch_add(1, std::memory_order_relaxed);
  gather();
}

// Lets work gather as long as it keeps arriving, and no longer than a cycle.
void Engine::gather() const {
  const auto end = Clock::now() + tuner_.cycle();
  std::uint64_t seen = queue_.submitted();
  while (queue_.has_news() && !role_.is_awaited() && Clock::now() < end) {
    sched_yield();
    sched_yield();
    const std::uint64_t now = queue_.submitted();
    if (now == seen) return;
    seen = now;
  }
}

// Tuning ----------------------------------------------------------------------

void Engine::tune(const Tuning& tuning) {
  if (rank_ != 0) {
    throw Failure(
        ErrorCode::kInvalidArgument,
        "tune(): only rank 0 may call it, for all ranks; this is rank " + std::to_string(rank_));
  }
  tuner_.want(tuning);
}

void Engine::notify(std::uint32_t notice) {
  if (rank_ != 0) {
    throw Failure(
        ErrorCode::kInvalidArgument,
        "notify(): only rank 0 may call it, for all ranks; this is rank " + std::to_string(rank_));
  }
  tuner_.notify(notice);
}

std::uint32_t Engine::notice() const noexcept { return tuner_.notice(); }

Tuning Engine::tuning() const { return tuner_.current(); }

void Engine::adopt(const Tuning& tuning) {
  for (const auto& backend : parts_.backends) backend->tune(tuning);
  tuner_.adopt(tuning);
}

Engine::Waits Engine::waits() const noexcept {
  const WaitMeter& meter = queue_.waits();
  const double ns_per_tick = queue_.recorder().scale().ns_per_tick();
  return {static_cast<double>(meter.waited()) * ns_per_tick * 1e-9, meter.agreed()};
}

double Engine::step_s() const noexcept {
  return static_cast<double>(steps_.step()) * queue_.recorder().scale().ns_per_tick() * 1e-9;
}

std::map<std::string, std::uint64_t> Engine::counters() const {
  std::map<std::string, std::uint64_t> counters{
      {"operations", operations_.load()},
      {"batches", batches_.load()},
      {"cache_hits", queue_.cache_hits()},
      {"engine_wakes", engine_wakes_.load()},
      {"lent", lending_.lent()},
      {"lent_in_vain", lending_.in_vain()},
      {"pending", static_cast<std::uint64_t>(queue_.pending())},
      {"stalls", stalls_.load()},
      {"steps", steps_.steps()},
      {"wait_us", static_cast<std::uint64_t>(waits().seconds * 1e6)},
  };
  parts_.liveness->add_counters(counters);
  return counters;
}

}  // namespace polyhvd
