// What an engine works with, how rank 0 changes it for all, and how it measures what that brings.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>

#include "control/tuning.h"
#include "engine/controller.h"
#include "observe/lock_order.h"
#include "observe/mailbox.h"
#include "observe/step_meter.h"

namespace polyhvd {

class Tuner {
 public:
  // `cycle` may be finer than the microseconds of `initial`. The speed of every
  // `steps_per_sample` steps goes to `mailbox`; 0: of none, and there need be no mailbox.
  Tuner(const Tuning& initial, std::chrono::nanoseconds cycle, int steps_per_sample,
        std::shared_ptr<Mailbox> mailbox)
      : mailbox_(std::move(mailbox)),
        meter_(steps_per_sample),
        cycle_ns_(cycle.count()),
        tuning_(initial) {}
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;

  // Any thread. What the ranks are to work with, from where the driver tells them; a later wish
  // replaces one that was not told yet.
  void want(const Tuning& tuning);
  // The same for a notice alone, which no later wish takes back. Notices count up.
  void notify(std::uint32_t notice);
  // What this rank works with.
  Tuning current() const;
  // The longest batching window of that.
  std::chrono::nanoseconds cycle() const noexcept {
    return std::chrono::nanoseconds(cycle_ns_.load(std::memory_order_relaxed));
  }

  // The driver's, all of them. Costs nothing.
  bool has_wish() const noexcept { return has_wish_.load(std::memory_order_relaxed); }
  std::optional<Tuning> take_wish();
  // An operation of all ranks follows what was agreed: its end shows them the same notice.
  void pass_notice() noexcept;
  // Any thread, after the end of an operation of all ranks: the last notice that precedes it in
  // the total order, and so the same on all ranks until the next one is submitted.
  std::uint32_t notice() const noexcept { return passed_notice_.load(std::memory_order_relaxed); }
  // Agreed; samples of the speed begin anew.
  void adopt(const Tuning& tuning);
  bool measures() const noexcept { return meter_.on(); }
  void measure(const Work& work);

 private:
  const std::shared_ptr<Mailbox> mailbox_;
  StepMeter meter_;                     // the driver's
  std::atomic<std::int64_t> cycle_ns_;  // the engine's thread reads it without the role
  std::atomic<bool> has_wish_{false};   // whether to look, without the lock
  std::uint32_t told_notice_ = 0;       // the driver's
  // Written before the operation's end is told, which orders it for whoever has waited for that.
  std::atomic<std::uint32_t> passed_notice_{0};
  mutable OrderedMutex<LockRank::tuning> mutex_;
  Tuning tuning_;               // guarded by mutex_
  std::optional<Tuning> wish_;  // likewise
};

}  // namespace polyhvd
