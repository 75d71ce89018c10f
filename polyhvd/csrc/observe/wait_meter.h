// How long a rank has waited for others: the time in which one of its operations was
// announced and not agreed on yet, however many there were. The rest of a step is its own time,
// which identifies a slow rank. The driver writes; any thread reads.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "observe/ticks.h"

namespace polyhvd {

class WaitMeter {
 public:
  // Driver: so many more operations wait for the other ranks.
  void on_announce(std::size_t count, Ticks now) noexcept {
    if (count == 0) return;
    if (open_ == 0) since_ = now;
    open_ += count;
  }
  // Driver: one of them waits no more.
  void on_agreement(Ticks now) noexcept {
    agreed_.store(agreed_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    if (--open_ > 0) return;
    const Ticks waited = waited_.load(std::memory_order_relaxed) + (now - since_);
    waited_.store(waited, std::memory_order_relaxed);
  }

  // Without the wait that is under way.
  Ticks waited() const noexcept { return waited_.load(std::memory_order_relaxed); }
  // How many operations were agreed on.
  std::uint64_t agreed() const noexcept { return agreed_.load(std::memory_order_relaxed); }

 private:
  std::size_t open_ = 0;  // the driver's, as is since_
  Ticks since_ = 0;
  std::atomic<Ticks> waited_{0};
  std::atomic<std::uint64_t> agreed_{0};
};

}  // namespace polyhvd
