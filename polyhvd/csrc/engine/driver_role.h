// Who makes an engine go on: one thread at a time, which negotiates and executes for all. It is
// a thread that waits for an operation, or one that lends itself for a moment, or else the
// engine's own.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>

#include "engine/adaptive_backoff.h"
#include "observe/lock_order.h"

namespace polyhvd {

// Any thread may call, unless noted otherwise. Taken by try-lock: it blocks no thread.
class DriverRole {
 public:
  DriverRole() = default;
  DriverRole(const DriverRole&) = delete;
  DriverRole& operator=(const DriverRole&) = delete;

  // Whether the calling thread has it, so that its own callback may wait.
  bool is_mine() const noexcept { return t_driven == this; }
  bool take() noexcept {
    bool taken = false;
    if (!taken_.compare_exchange_strong(taken, true)) return false;
    t_driven = this;
    return true;
  }
  // By its holder, as is the next one.
  void release() noexcept {
    t_driven = nullptr;
    taken_.store(false);
    notify();
  }
  // The holder leaves, and no thread takes the role again.
  void retire() noexcept { t_driven = nullptr; }

  // Waits without it until `done`, or it is free, or a moment has passed: the caller looks again.
  void await(const std::function<bool()>& done);
  bool is_awaited() const noexcept { return waiters_.load() > 0; }
  // After something that threads in await() look at has changed.
  void notify() noexcept {
    if (is_awaited()) notify_waiters();
  }

  // A thread claims it to end the engine: from now on, threads that wait for operations release it.
  void claim() noexcept { claimed_.store(true); }
  bool is_claimed() const noexcept { return claimed_.load(); }

  // The engine's thread is about to sleep without it, or is awake again.
  void set_engine_asleep(bool asleep) noexcept { engine_sleeps_.store(asleep); }
  bool is_engine_asleep() const noexcept { return engine_sleeps_.load(); }

 private:
  void notify_waiters() noexcept;

  // The one that the current thread has.
  static inline constinit thread_local const DriverRole* t_driven = nullptr;

  std::atomic<bool> taken_{false};    // the role itself
  std::atomic<bool> claimed_{false};  // never false again
  std::atomic<bool> engine_sleeps_{
      false};                    // the thread that leaves the role has to check for messages
  std::atomic<int> waiters_{0};  // threads in await(), so that notify() costs nothing
  OrderedMutex<LockRank::turn> turn_mutex_;  // pairs with turn_, guards nothing
  OrderedCondition turn_;
};

// Whether it pays that a thread which only submits drives its operation itself, for a moment: it
// does not where the other ranks are mostly late. Any thread.
class Lending {
 public:
  bool is_worth_it() noexcept { return worth_.worth_it(); }
  // How it went. `counts`: there was only this operation, so it predicts the next one.
  void note(bool in_time, bool counts) noexcept {
    if (counts) worth_.note(in_time);
    (in_time ? lent_ : in_vain_).fetch_add(1, std::memory_order_relaxed);
  }
  // Operations that their submitter has driven to the end, and that it left to the engine's thread.
  std::uint64_t lent() const noexcept { return lent_.load(std::memory_order_relaxed); }
  std::uint64_t in_vain() const noexcept { return in_vain_.load(std::memory_order_relaxed); }

 private:
  AdaptiveBackoff worth_;
  std::atomic<std::uint64_t> lent_{0};  // statistics, as is the next one
  std::atomic<std::uint64_t> in_vain_{0};
};

}  // namespace polyhvd
