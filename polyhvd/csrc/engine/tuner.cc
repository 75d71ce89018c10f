#include "engine/tuner.h"

#include <algorithm>
#include <string>
#include <utility>

namespace polyhvd {

void Tuner::want(const Tuning& tuning) {
  std::lock_guard lock(mutex_);
  const std::uint32_t notice = wish_.value_or(tuning_).notice;
  wish_ = tuning;
  wish_->notice = std::max(notice, tuning.notice);
  has_wish_.store(true, std::memory_order_relaxed);
}

void Tuner::notify(std::uint32_t notice) {
  std::lock_guard lock(mutex_);
  Tuning wish = wish_.value_or(tuning_);
  wish.notice = std::max(notice, wish.notice);
  wish_ = wish;
  has_wish_.store(true, std::memory_order_relaxed);
}

Tuning Tuner::current() const {
  std::lock_guard lock(mutex_);
  return tuning_;
}

std::optional<Tuning> Tuner::take_wish() {
  std::lock_guard lock(mutex_);
  has_wish_.store(false, std::memory_order_relaxed);
  return std::exchange(wish_, std::nullopt);
}

void Tuner::adopt(const Tuning& tuning) {
  cycle_ns_.store(std::int64_t{1000} * tuning.cycle_us, std::memory_order_relaxed);
  meter_.restart();
  sent_notice_ = tuning.notice;
  std::lock_guard lock(mutex_);
  tuning_ = tuning;
}

void Tuner::show_notice(std::uint32_t notice) noexcept {
  std::uint32_t shown = shown_notice_.load(std::memory_order_relaxed);
  while (shown < notice &&
         !shown_notice_.compare_exchange_weak(shown, notice, std::memory_order_relaxed)) {
  }
}

void Tuner::measure(const Work& work) {
  for (const StepMeter::Time now = StepMeter::Time::clock::now();
       const OperationPtr& operation : work.operations) {
    std::size_t bytes = 0;
    for (const TensorView& tensor : operation->submission.inputs) {
      bytes += static_cast<std::size_t>(element_count(tensor.shape)) * item_size(tensor.dtype);
    }
    const Submission& s = operation->submission;
    // Calls without a name never come again by name, but others of their size do.
    const std::string recurring =
        s.turn == 0 ? s.name : std::string(name_of(s.kind)) + ".noname." + std::to_string(bytes);
    if (const auto sample = meter_.note(recurring, bytes, now)) mailbox_->post(*sample);
  }
}

}  // namespace polyhvd
