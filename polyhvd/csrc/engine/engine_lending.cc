// How a thread that only submits drives its own operation; see Engine::lend.
#include <sched.h>

#include "engine/engine.h"

namespace polyhvd {
namespace {

constexpr int kRoleYields = 50;

// Whether its transfer, once agreed, is short.
bool is_small(const Submission& s) noexcept {
  if (!reduces(s.kind) && s.kind != OpKind::kBroadcast) return false;
  if (device_of(s).kind != DeviceKind::kCpu) return false;
  std::size_t bytes = 0;
  for (const TensorView& tensor : s.inputs) {
    bytes += static_cast<std::size_t>(element_count(tensor.shape)) * item_size(tensor.dtype);
  }
  return bytes <= Engine::kLendBytesMax;
}

}  // namespace

bool Engine::submit_lending(Submission submission) {
  const bool small = is_small(submission);
  submit(std::move(submission), true);
  // Of a second one in flight, and of a callback's, the first one's driver takes care.
  if (small && queue_.pending() == 1 && !role_.is_mine() && lending_.is_worth_it()) return true;
  parking_->wake_if_asleep();
  return false;
}

void Engine::lend() noexcept {
  const std::uint64_t submitted = queue_.submitted();
  // Its holder may be the thread that has done the operation before this one, about to leave.
  for (int i = 0; role_.is_claimed() || !take_role(); ++i) {
    if (role_.is_claimed() || i == kRoleYields) {
      parking_->wake_if_asleep();
      return;
    }
    sched_yield();
  }
  try {
    const bool in_time = parking_->await_briefly(
        [&] {
          progress();
          return queue_.pending() != 1 || queue_.submitted() != submitted || role_.is_claimed();
        },
        Clock::now() + kLendTime);
    lending_.note(in_time, !in_time || queue_.pending() < 2);
    if (!in_time) nudge_others();
  } catch (const Failure& failure) {
    fail(cause_of(failure));
  }
  release_role();
}

}  // namespace polyhvd
