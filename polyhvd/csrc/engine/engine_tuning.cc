// How an engine measures its steps on rank 0, and takes up what the tuner makes of that.
#include <optional>
#include <string>
#include <utility>

#include "engine/engine.h"

namespace polyhvd {

void Engine::measure(const Work& work) {
  for (const Clock::time_point now = Clock::now();
       const OperationPtr& operation : work.operations) {
    std::size_t bytes = 0;
    for (const TensorView& tensor : operation->submission.inputs) {
      bytes += static_cast<std::size_t>(element_count(tensor.shape)) * item_size(tensor.dtype);
    }
    const Submission& s = operation->submission;
    // Calls without a name never come again by name, but others of their size do.
    const std::string recurring =
        s.turn == 0 ? s.name : std::string(name_of(s.kind)) + ".noname." + std::to_string(bytes);
    if (const auto sample = meter_.note(recurring, bytes, now)) {
      options_.mailbox->post(*sample);
    }
  }
}

void Engine::tune(const Tuning& tuning) {
  if (rank_ != 0) {
    throw Failure(ErrorCode::kInvalidArgument,
                  "tune(): only rank 0 tunes, for all; this is rank " + std::to_string(rank_));
  }
  std::lock_guard lock(tuning_mutex_);
  wanted_ = tuning;
  has_wanted_.store(true, std::memory_order_relaxed);
}

Tuning Engine::tuning() const {
  std::lock_guard lock(tuning_mutex_);
  return tuning_;
}

void Engine::take_wanted() {
  std::optional<Tuning> wanted;
  {
    std::lock_guard lock(tuning_mutex_);
    has_wanted_.store(false, std::memory_order_relaxed);
    wanted = std::exchange(wanted_, std::nullopt);
  }
  if (wanted) controller_->tune(*wanted);
}

void Engine::adopt(const Tuning& tuning) {
  cycle_ns_.store(std::int64_t{1000} * tuning.cycle_us, std::memory_order_relaxed);
  for (const auto& backend : parts_.backends) backend->tune(tuning);
  meter_.restart();
  std::lock_guard lock(tuning_mutex_);
  tuning_ = tuning;
}

}  // namespace polyhvd
