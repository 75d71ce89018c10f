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
  // `steps_per_sample` steps goes to `mailbox`; 0: of none, and no mailbox is needed.
  Tuner(const Tuning& initial, std::chrono::nanoseconds cycle, int steps_per_sample,
        std::shared_ptr<Mailbox> mailbox)
      : mailbox_(std::move(mailbox)),
        meter_(steps_per_sample),
        cycle_ns_(cycle.count()),
        tuning_(initial) {}
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;

  // Any thread. What the ranks are to work with, which the driver sends them; a later wish
  // replaces one that was not sent yet.
  void want(const Tuning& tuning);
  // The same only for a notice, which no later wish revokes. Notices count up.
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
  // The last notice that was agreed: an operation that ends now follows it on all ranks.
  std::uint32_t sent_notice() const noexcept { return sent_notice_; }
  // Agreed; samples of the speed begin again.
  void adopt(const Tuning& tuning);
  bool measures() const noexcept { return meter_.on(); }
  void measure(const Work& work);

  // Any thread: the program has waited for an operation that follows this notice.
  void show_notice(std::uint32_t notice) noexcept;
  // Any thread: the last notice that was shown. It is the same on all ranks that have waited for
  // the same operations, even if other operations are in progress, or have ended only on some
  // ranks.
  std::uint32_t notice() const noexcept { return shown_notice_.load(std::memory_order_relaxed); }

 private:
  const std::shared_ptr<Mailbox> mailbox_;
  StepMeter meter_;                             // the driver's
  std::atomic<std::int64_t> cycle_ns_;          // the engine's thread reads it without the role
  std::atomic<bool> has_wish_{false};           // whether to look, without the lock
  std::uint32_t sent_notice_ = 0;               // the driver's
  std::atomic<std::uint32_t> shown_notice_{0};  // a thread that has waited reads its own or a later
  mutable OrderedMutex<LockRank::tuning> mutex_;
  Tuning tuning_;               // guarded by mutex_
  std::optional<Tuning> wish_;  // likewise
};

}  // namespace polyhvd
