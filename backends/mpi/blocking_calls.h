// A thread for the calls of MPI that return only when other ranks have made them too, and that
// MPI offers in no other form. Whoever needs one waits beside it, and may stop waiting; the
// thread then stays in the call for as long as the process lives.
//
// MPI is initialised and finalised here as well, for the standard wants one thread for both.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "control/error.h"
#include "observe/lock_order.h"

namespace polyhvd::mpi {

class BlockingCall {
 public:
  BlockingCall(std::string name, std::function<void()> call)
      : name_(std::move(name)), call_(std::move(call)) {}

  const std::string& name() const noexcept { return name_; }
  bool is_finished() const noexcept { return finished_.load(); }
  // Sleeps until the call has returned, or for this time; returns whether it has. MPI may spin in
  // the call and need the cores: a caller that looked every now and then would take them from it.
  bool wait_for(std::chrono::nanoseconds time) const;
  // After it has finished: throws what it has thrown.
  void check() const {
    if (error_) throw Failure(*error_);
  }
  void run() noexcept;

 private:
  std::string name_;  // of MPI's function
  std::function<void()> call_;
  std::optional<Error> error_;         // only the thread's before finished_ is true
  std::atomic<bool> finished_{false};  // set under the mutex, for threads that sleep
  mutable OrderedMutex<LockRank::mpi_call> mutex_;
  mutable OrderedCondition returned_;
};

class BlockingCalls {
 public:
  BlockingCalls();
  BlockingCalls(const BlockingCalls&) = delete;
  BlockingCalls& operator=(const BlockingCalls&) = delete;

  // `call` owns all that it touches, since the caller may be gone when it returns. Throws
  // Failure(kPeerLost) while an earlier one has not returned.
  std::shared_ptr<BlockingCall> begin(std::string name, std::function<void()> call);

 private:
  struct Queue;
  std::shared_ptr<Queue> queue_;  // shared with the thread, which is never joined
};

}  // namespace polyhvd::mpi
