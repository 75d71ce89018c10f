// Measures how fast a job moves bytes, over whole steps of training. A step ends where
// the operation that began it comes again. Pure: time is an argument.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace polyhvd {

struct StepSample {
  std::uint64_t bytes = 0;
  double seconds = 0;
  int steps = 0;
  std::uint64_t fingerprint = 0;  // of the operations of a step, in any order
};

class StepMeter {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // `steps`: in a sample; 0 measures nothing.
  explicit StepMeter(int steps) : steps_(steps) {}

  bool on() const noexcept { return steps_ > 0; }

  // An operation is done. Returns a sample when it completes one; then, as at first,
  // nothing is measured until restart().
  std::optional<StepSample> note(std::string_view name, std::size_t bytes, Time now);

  // Begins again, with the next whole step.
  void restart() noexcept;

 private:
  const int steps_;
  std::string anchor_;            // the operation that begins a step; empty: not chosen
  std::size_t since_anchor_ = 0;  // operations
  std::size_t patience_ = 64;     // how many of them until another is chosen
  int step_ = -1;                 // of the sample; -1: within the step that is left out
  Time begin_{};
  StepSample sample_;
  bool idle_ = true;
};

}  // namespace polyhvd
