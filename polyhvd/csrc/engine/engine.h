// The operation queue of one rank, in motion: takes submissions from any thread,
// and lets one thread at a time, the driver, negotiate and execute them. Several
// engines may live in one process.
//
// Driving is a role, taken by try-lock: by a thread that waits on an operation,
// else by the engine's own thread. A blocking call thus runs from submit to done
// in the caller's thread, with no hand-over; and a small operation that no thread waits
// for mostly in the thread that submits it, which lends itself for a moment.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "control/operation.h"
#include "control/process_set.h"
#include "control/tuning.h"
#include "engine/backend.h"
#include "engine/controller.h"
#include "engine/driver_role.h"
#include "engine/executor.h"
#include "engine/liveness.h"
#include "engine/op_queue.h"
#include "engine/parking.h"
#include "engine/running_watch.h"
#include "engine/stall_watch.h"
#include "engine/tuner.h"
#include "observe/flight.h"
#include "observe/lock_order.h"
#include "observe/mailbox.h"
#include "observe/step_clock.h"
#include "observe/timeline.h"

namespace polyhvd {

struct EngineOptions {
  CoordinatorOptions coordinator;
  std::chrono::duration<double> cycle_time{0.001};  // longest batching window
  std::chrono::duration<double> data_timeout{300.0};
  StallTimes stalls;
  bool data_checksums = false;  // of tensor bytes between hosts
  bool reproducible = false;    // sums do not depend on hosts, transport or backend
  int attaching = 1;            // host::Attaching, by its number
  bool crowded = false;         // more ranks than cores on this host
  int core = -1;                // that the engine's thread is bound to
  int steps_per_sample = 0;     // of the speed, posted to the mailbox of the root; 0: none
  DumpPlace flights;            // of flight dumps
  int report = -1;  // a pipe to the launcher, for what other ranks have caused; -1: none
  std::function<void(const std::string&)> log = [](const std::string&) {};  // warnings; any thread
  std::function<void(const std::string&)> loss_log{};  // of what a lost rank leads to; none: log
  std::shared_ptr<Mailbox> mailbox;                    // to the program's language; may be null
};

// Everything that connects an engine to other ranks.
struct EngineParts {
  std::unique_ptr<Liveness> liveness;
  std::vector<std::unique_ptr<Backend>> backends;  // first choice first
  std::size_t on_cpu = 0;                          // the one of them that takes everything on CPUs
  std::shared_ptr<Devices> devices;                // null: only CPUs have tensors
  std::unique_ptr<Channel> parent;                 // null on the root
  std::vector<Child> children;
};

class Engine {
 public:
  // `parking` is the one that the parts were built with. `overlap` is called by
  // backends in long transfers; the engine sets it.
  Engine(int rank, ProcessSets sets, std::unique_ptr<Parking> parking, EngineParts parts,
         EngineOptions options, std::function<void()>& overlap);
  ~Engine();  // shuts down
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const noexcept { return rank_; }

  // `blocking`: wait() follows at once, so no thread has to be woken. `where` names
  // the caller's line and is called only for operations that are new.
  // Throws Failure for a bad call, or with what ended the engine.
  OperationPtr submit(Submission submission, bool blocking = false,
                      const std::function<std::string()>& where = {});

  // See OpQueue::take_turn(). While this rank is behind nothing is counted.
  Turn take_turn(ProcessSetId set, OpKind kind) {
    return is_behind() ? 1 : queue_.take_turn(set, kind);
  }
  // Whether the other ranks are past what this rank submits, as it joins an elastic job that runs.
  // A broadcast then leaves this rank its own values, a barrier is done at once, and everything
  // else is refused. No other rank takes part in it. Any thread.
  void set_behind(bool behind) noexcept { behind_.store(behind, std::memory_order_release); }
  bool is_behind() const noexcept { return behind_.load(std::memory_order_acquire); }
  // Members of every process set, by its number.
  std::map<ProcessSetId, std::vector<int>> process_sets() const { return queue_.process_sets(); }

  // As submit(), without a waiting thread. True: no thread was woken, and lend() follows at once on
  // this thread; it drives until no operation is in flight, and for kLendTime at most while
  // the other ranks are late. Completion callbacks may run in it.
  bool submit_lending(Submission submission);
  void lend() noexcept;
  static constexpr std::chrono::microseconds kLendTime{200};
  static constexpr std::size_t kLendBytesMax = 64 * 1024;

  // Returns when the operation is finished; throws its error as Failure.
  // `interrupted` is called now and then; true makes wait() throw
  // Failure(kInterrupted): the operation continues unless it was being executed.
  void wait(const OperationPtr& operation, const std::function<bool()>& interrupted = {});

  // Ends this rank's part in good order: what was agreed still runs, what is
  // pending fails. `words`: see Departure; they are cut at kLastWordsBytesMax. Idempotent.
  void shutdown(std::string words = {});
  // Ends the world for everybody, also while an operation runs that does not move: an elastic
  // job continues in the next one. Any thread.
  void abort(const std::string& reason);
  // In a forked child: closes the descriptors, and nothing else ever again.
  void abandon() noexcept;

  std::map<std::string, std::uint64_t> counters() const;
  // How long this rank has waited for others to come as far as it, in which every operation
  // counts as of its announcement; and how many were agreed on. Any thread.
  struct Waits {
    double seconds = 0;
    std::uint64_t agreed = 0;
  };
  Waits waits() const noexcept;
  // The median of the last steps in this world, in seconds; 0: there were none. Any thread.
  double step_s() const noexcept;
  // Other ranks of this host whose processes are known to have died, as far as this engine has run.
  // Any thread.
  std::vector<int> dead_here() const { return parts_.liveness->dead_here(); }

  // On world rank 0: what all ranks work with from their next operations on. The
  // samples of the speed begin again with it.
  void tune(const Tuning& tuning);
  // What this rank works with.
  Tuning tuning() const;
  // On rank 0: a number for the program of every rank, as an entry in the total order. Numbers
  // count up.
  void notify(std::uint32_t notice);
  // The last such number that precedes an operation of all ranks for which the program has waited.
  std::uint32_t notice() const noexcept;
  // Whether an operation has raised since the world, or a part of it, has failed; or has no values
  // although it has returned. Any thread.
  bool has_lost_results() const noexcept { return has_lost_results_.load(); }
  // Whether devices have done all that operations have begun. Any thread. Throws Failure when a
  // device has failed.
  bool are_devices_done() { return executor_.are_devices_done(); }

  // Both for any thread, in any state of the engine.
  Timeline& timeline() noexcept { return timeline_; }
  FlightDump& flight() noexcept { return flight_; }

 private:
  using Clock = Parking::Clock;

  bool progress();
  void drive(const std::function<bool()>& until);
  void on_slow();
  void check_health();
  void check_flight(Clock::time_point now);
  void report(const Error& error) noexcept;
  void execute(Work& work);
  void note_steps(const Work& work) noexcept;
  void connect(ProcessSetId set);
  void disconnect(ProcessSetId set);
  Backend& backend_for(const Submission& submission) const;
  void take_from_device(Submission& submission) const;
  OperationPtr run_behind(Submission submission, const std::function<std::string()>& where) const;
  Communicator& communicator_for(const Work& work);
  void record_end(const Operation& operation, bool error);
  void complete(const OperationPtr& operation, std::optional<Error> error);
  Error cause_of(const Failure& failure) noexcept;
  Error error_for(const Submission& submission, const Error& cause) const;
  void fail(const Error& error) noexcept;

  bool take_role() noexcept;
  void release_role() noexcept;
  // Takes the role from whoever waits with it, to end the engine.
  void claim_role();

  void run();
  void bind_to_core() const;
  void gather() const;
  void nudge_others();
  // The error, which the program receives now.
  const Error& shown(const Error& error) noexcept;
  void adopt(const Tuning& tuning);
  bool idle_for_long();
  void doze();

  const int rank_;
  ProcessSets sets_;  // changed through queue_, by the driver; only it reads them here
  const EngineOptions options_;
  OpQueue queue_;
  Timeline timeline_;
  FlightDump flight_;
  OwnedFd report_;
  int reports_ = 0;  // with the driver's role
  std::unique_ptr<Parking> parking_;
  EngineParts parts_;  // const after construction; the objects are the driver's, but for devices
  Executor executor_;  // driver
  std::unique_ptr<Controller> controller_;   // driver
  std::unique_ptr<StallWatch> stall_watch_;  // driver
  RunningWatch running_watch_;               // driver
  std::map<std::pair<std::size_t, ProcessSetId>, std::unique_ptr<Communicator>> communicators_;

  // The driver's own, guarded by the role.
  bool executing_ = false;
  bool failed_ = false;
  bool failure_is_posted_ =
      false;  // the others know that this engine has failed: it cannot leave any more
  const std::function<bool()>* interrupted_ = nullptr;
  Clock::time_point next_interrupt_check_{};
  Clock::time_point next_flight_check_{};

  DriverRole role_;  // any thread, each in its own way
  Lending lending_;  // likewise
  Tuner tuner_;      // likewise

  std::atomic<bool> aborting_{false};      // a reason was given, or is about to be
  std::atomic<bool> abort_posted_{false};  // makes the holder of the role give up
  std::string abort_reason_;               // written once, before abort_posted_
  bool is_uneven_ = false;  // the parent has come to its end; written once, before parent_departed_
  std::atomic<bool> parent_departed_{false};   // the parent has left, and so this engine ended
  std::atomic<bool> has_lost_results_{false};  // any thread that raises; the driver
  std::atomic<bool> behind_{false};            // see set_behind()
  std::atomic<bool> stopping_{false};          // by shutdown(): the engine's thread ends
  std::atomic<bool> abandoned_{false};  // in a forked child, where that thread does not exist
  OrderedMutex<LockRank::shutdown>
      shutdown_mutex_;      // for one shutdown at a time, from begin to end
  bool shut_down_ = false;  // guarded by shutdown_mutex_

  std::atomic<std::uint64_t> operations_{0};  // statistics
  std::atomic<std::uint64_t> batches_{0};
  std::atomic<std::uint64_t> engine_wakes_{0};
  std::atomic<std::uint64_t> stalls_{0};  // reports, on rank 0
  StepClock steps_;

  std::thread thread_;
};

}  // namespace polyhvd
