// How a thread waits: spin, then yield, then sleep in poll(2) on everything
// that could end the wait. One per engine.
//
// Two threads may sleep at the same time: the one that holds the driver's role
// (await), and the engine's own thread without it (doze). Callbacks run only on the
// role's holder.
#pragma once

#include <sched.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "control/error.h"
#include "observe/lock_order.h"
#include "observe/ticks.h"

namespace polyhvd {

class Parking {
 public:
  using Clock = std::chrono::steady_clock;
  static constexpr Clock::time_point kForever = Clock::time_point::max();

  Parking();
  ~Parking();
  Parking(const Parking&) = delete;
  Parking& operator=(const Parking&) = delete;

  // Watches `fd` for `events` while asleep. `on_ready` runs on the role's holder
  // with poll's revents; it drains the descriptor or unwatches it, and may throw
  // Failure to end the wait.
  void watch(int fd, short events, std::function<void(short)> on_ready);
  void unwatch(int fd);
  void unwatch_all();
  // Other events for one wait of the role's holder; doze() keeps the first ones.
  void set_events(int fd, short events);

  // The word that peers on this host read before they wake it. A rank that dozes has
  // nothing pending: whether it is worth waking is the peer's choice. One that
  // waits is woken for everything. Without a segment it is a word of this process.
  static constexpr std::uint32_t kAwake = 0;
  static constexpr std::uint32_t kDozing = 1;
  static constexpr std::uint32_t kWaiting = 2;
  // Before driving: it need not be woken. kDozing stays, since wakes at that level are rare,
  // and so the word goes to the peers' caches once instead of twice in every operation.
  void stay_awake() noexcept {
    if (sleep_flag_->load(std::memory_order_relaxed) != kWaiting) return;
    sleep_flag_->store(kAwake, std::memory_order_relaxed);
  }
  // Before the last look at the work: peers that publish later wake us.
  void let_wake(std::uint32_t level) noexcept {
    if (sleep_flag_->load(std::memory_order_relaxed) != level) sleep_flag_->store(level);
  }
  // Null goes back to it. While no other thread uses this object.
  void set_sleep_flag(std::atomic<std::uint32_t>* flag) noexcept {
    sleep_flag_ = flag == nullptr ? &own_flag_ : flag;
  }
  std::atomic<std::uint32_t>& sleep_flag() noexcept { return *sleep_flag_; }

  // Waits ask `ready` again and again instead of sleeping, for what no descriptor
  // announces; `ready` takes the naps. Role's holder only.
  void set_polling(bool asking) noexcept { asking_ = asking; }

  // Bytes were given to a library that sends only while it is polled, such as MPI.
  // Sleeps of both threads are short now, and longer the longer ago that is. Any thread.
  void sleep_lightly() noexcept {
    sent_.store(Clock::now().time_since_epoch().count());
    if (deeply_asleep_.load()) wake();
  }

  // Fewer spins when ranks outnumber cores.
  void set_crowded(bool crowded) noexcept { crowded_ = crowded; }

  // Runs now and then while the role's holder waits, and after each wake-up:
  // moves control traffic, and throws Failure to end the wait.
  void set_on_slow(std::function<void()> on_slow) { on_slow_ = std::move(on_slow); }

  // Returns when `ready()` is true. `ready` may make progress itself. Throws what
  // it, on_slow or a callback throws, and Failure(kTimeout) after `deadline`.
  template <class Ready>
  void await(Ready&& ready, Clock::time_point deadline) {
    if (ready()) return;
    const Ticks begin = measures_ ? ticks_now() : 0;
    await_spinning(ready, deadline);
    if (begin != 0) waited_ += ticks_now() - begin;
  }

  // Whether `ready()` was true before `end`. Never sleeps. Role's holder only.
  template <class Ready>
  bool await_briefly(Ready&& ready, Clock::time_point end) {
    for (int i = 1; !ready(); ++i) {
      pause();
      if (i % kSpinsPerLook != 0) continue;
      if (Clock::now() >= end) return false;
      sched_yield();
    }
    return true;
  }

  // Whether waits are added up in waited(). Role's holder only.
  void measure_waits(bool measures) noexcept { measures_ = measures; }
  Ticks waited() const noexcept { return waited_; }

  // Grows whenever a wait that had to sleep has ended, and with note_move(). Who finds it
  // unchanged after long knows that a transfer does not move. Role's holder only.
  std::uint64_t moves() const noexcept { return moves_; }
  void note_move() noexcept { ++moves_; }
  // World rank for which the holder waits, if a transfer has set it; -1: unknown.
  int waits_for() const noexcept { return waits_for_; }
  class WaitFor {  // sets it
   public:
    WaitFor(Parking& parking, int rank) noexcept : parking_(parking) { parking_.waits_for_ = rank; }
    ~WaitFor() { parking_.waits_for_ = -1; }
    WaitFor(const WaitFor&) = delete;
    WaitFor& operator=(const WaitFor&) = delete;

   private:
    Parking& parking_;
  };

  // Runs the callbacks of descriptors that are ready now. Role's holder only.
  void poll_now() { (void)poll_watched(0); }

  // Sleeps without the role until a descriptor is ready, wake() was called or
  // `timeout` passed. The caller has raised the sleep flag and checked its work.
  void doze(std::chrono::milliseconds timeout);

  // Ends the sleep of whoever sleeps. Any thread.
  void wake() noexcept;
  // The same, if a thread sleeps at all; call it after publishing the work.
  void wake_if_asleep() noexcept {
    if (asleep_.load() > 0) wake();
  }
  // For doze(): set before the last look at the work.
  void announce_sleep() noexcept { asleep_.fetch_add(1); }
  void end_sleep() noexcept { asleep_.fetch_sub(1); }

 private:
  static constexpr int kSpins = 4000;
  static constexpr int kSpinsCrowded = 50;
  static constexpr int kSpinsPerYield = 100;  // the peer may be waiting for this very core
  static constexpr int kSpinsPerLook = 20;    // at the clock, in await_briefly
  static constexpr int kYields = 100;
  static constexpr int kYieldsPerCheck = 16;

  struct Watched {
    int fd;
    short idle_events;
    short events;
    std::function<void(short)> on_ready;
  };

  static void pause() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }
  template <class Ready>
  void await_spinning(Ready& ready, Clock::time_point deadline) {
    const int spins = crowded_ ? kSpinsCrowded : kSpins;
    for (int i = 1; i < spins; ++i) {
      pause();
      if (ready()) return;
      if (i % kSpinsPerYield == 0) sched_yield();
    }
    await_slowly(std::ref(ready), deadline);
  }
  void await_slowly(const std::function<bool()>& ready, Clock::time_point deadline);
  bool poll_watched(int timeout_ms);
  // The longest sleep, at most `most`.
  std::chrono::milliseconds sleep_max(std::chrono::milliseconds most) const noexcept;
  void drain_wake_fd() noexcept;

  int wake_fd_;
  std::atomic<std::uint32_t> own_flag_{0};
  std::atomic<std::uint32_t>* sleep_flag_ = &own_flag_;
  std::atomic<int> asleep_{0};              // threads in poll(2), for wake_if_asleep
  std::atomic<Clock::rep> sent_{0};         // when sleep_lightly() was called; 0: never
  std::atomic<bool> deeply_asleep_{false};  // doze() would not soon see that sent_ has changed
  bool crowded_ = false;                    // set before the engine's threads exist
  bool asking_ = false;                     // the role's holder's
  bool measures_ = false;                   // likewise, as is waited_
  Ticks waited_ = 0;
  std::uint64_t moves_ = 0;  // likewise
  int waits_for_ = -1;       // likewise
  std::function<void()> on_slow_;
  OrderedMutex<LockRank::watched> watched_mutex_;
  std::vector<Watched> watched_;  // guarded by watched_mutex_
};

}  // namespace polyhvd
