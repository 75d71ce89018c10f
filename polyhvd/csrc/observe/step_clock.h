// Counts the steps of training that a rank has completed, and how long the last ones took. A step
// ends when the operation that began it comes again. Pure: time is an argument. The driver writes;
// any thread reads.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "observe/ticks.h"

namespace polyhvd {

class StepClock {
 public:
  // Driver: an operation has run. `key` is the same for an operation in each step.
  void note(std::size_t key, Ticks now) noexcept {
    if (has_anchor_ && key == anchor_) {
      since_anchor_ = 0;
      const std::uint64_t steps = steps_.load(std::memory_order_relaxed);
      if (has_begun_) last_[steps % kLast].store(now - ended_, std::memory_order_relaxed);
      ended_ = now;
      if (has_begun_) steps_.store(steps + 1, std::memory_order_release);
      has_begun_ = true;
      return;
    }
    if (has_anchor_ && since_anchor_ < (has_begun_ ? patience_ : search_)) {
      ++since_anchor_;
      return;
    }
    // An operation that has not come for so long comes once, or steps are longer than thought. The
    // search doubles as in R. P. Brent, "An improved Monte Carlo factorization algorithm" (1980):
    // the operation that begins a step is found within three steps.
    if (has_begun_) patience_ *= 2;
    search_ = has_begun_ || !has_anchor_ ? 1 : 2 * search_;
    has_anchor_ = true;
    anchor_ = key;
    since_anchor_ = 0;
    has_begun_ = false;
  }

  std::uint64_t steps() const noexcept { return steps_.load(std::memory_order_acquire); }

  // The median of the last steps; 0: there were none.
  Ticks step() const noexcept {
    std::array<Ticks, kLast> times{};
    const std::size_t count = std::min<std::uint64_t>(steps(), kLast);
    if (count == 0) return 0;
    for (std::size_t i = 0; i < count; ++i) times[i] = last_[i].load(std::memory_order_relaxed);
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(count / 2);
    std::nth_element(times.begin(), middle, times.begin() + static_cast<std::ptrdiff_t>(count));
    return *middle;
  }

 private:
  static constexpr std::size_t kLast = 16;

  bool has_anchor_ = false;  // the driver's, as is all up to ended_
  bool has_begun_ = false;   // the first step; the one before may have been shorter
  std::size_t anchor_ = 0;   // key of the operation that begins a step
  std::size_t since_anchor_ = 0;
  std::size_t search_ = 1;     // operations until another is chosen, before the first step
  std::size_t patience_ = 64;  // the same, after it
  Ticks ended_ = 0;            // the last step
  std::atomic<std::uint64_t> steps_{0};
  std::array<std::atomic<Ticks>, kLast> last_{};
};

}  // namespace polyhvd
