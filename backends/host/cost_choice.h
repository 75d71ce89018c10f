// Which of two ways to do a thing is cheaper at present, from what each has cost. Pure.
#pragma once

#include <array>
#include <cstddef>
#include <limits>

namespace polyhvd::host {

// `Way` has two values: 0, which is taken at first, and 1.
template <class Way>
class CostChoice {
 public:
  struct Habit {
    float advantage;    // way 0 must cost this many times as much as way 1 to be left
    int first_trial;    // way 1 is tried for the first time by the time of so many
    int trial_every;    // and whichever is not the usual one is tried once in so many
    int trials_in_row;  // so often each time: the first one may find nothing prepared
  };
  explicit CostChoice(const Habit& habit) : habit_(habit), until_(habit.first_trial) {}

  Way usual() const noexcept { return usual_; }

  // What the next time is to be. Call note() when it is over and its cost is known.
  Way next() noexcept {
    if (--until_ >= habit_.trials_in_row) return usual_;
    if (until_ == 0) until_ = habit_.trial_every;
    return static_cast<Way>(1 - static_cast<int>(usual_));
  }

  void note(Way way, float cost) noexcept {
    Cost& known = costs_[static_cast<std::size_t>(way)];
    known.before = known.last;
    known.last = cost;
    usual_ = costs_[0].estimate() > habit_.advantage * costs_[1].estimate() ? Way{1} : Way{0};
  }

 private:
  // The lesser of the last two, since a thread may lose its core in the middle of one.
  struct Cost {
    float last = std::numeric_limits<float>::infinity();
    float before = std::numeric_limits<float>::infinity();
    float estimate() const noexcept { return last < before ? last : before; }
  };
  Habit habit_;
  std::array<Cost, 2> costs_;
  Way usual_ = Way{0};
  int until_;
};

}  // namespace polyhvd::host
