#include "engine/driver_role.h"

#include <sched.h>

#include <chrono>

namespace polyhvd {
namespace {

// The driver is done soon, or leaves soon; to be woken would take longer than either.
constexpr int kTurnYields = 50;
constexpr auto kTurnInterval = std::chrono::milliseconds(100);

}  // namespace

void DriverRole::await(const std::function<bool()>& done) {
  waiters_.fetch_add(1);
  const auto over = [&] { return done() || !taken_.load(); };
  for (int i = 0; i < kTurnYields && !over(); ++i) sched_yield();
  if (!over()) {
    std::unique_lock lock(turn_mutex_);
    turn_.wait_for(lock, kTurnInterval, over);
  }
  waiters_.fetch_sub(1);
}

void DriverRole::notify_waiters() noexcept {
  std::lock_guard lock(turn_mutex_);
  turn_.notify_all();
}

}  // namespace polyhvd
