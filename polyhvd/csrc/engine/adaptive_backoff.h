// Whether something that may work or not is worth the next attempt: always, while
// more than two of three work; else after pauses, which grow until several did.
#pragma once

#include <algorithm>
#include <atomic>

namespace polyhvd {

// Thread-safe; what threads do at the same moment may be forgotten.
class AdaptiveBackoff {
 public:
  static constexpr int kPauseMin = 4;
  static constexpr int kPauseMax = 256;

  // Asked at each occasion; after a true one, note() says how it went.
  bool worth_it() noexcept {
    const int left = left_out_.load(std::memory_order_relaxed);
    if (left == 0) return true;
    left_out_.store(left - 1, std::memory_order_relaxed);
    return false;
  }

  void note(bool worked) noexcept {
    const int score = score_.load(std::memory_order_relaxed) + (worked ? 1 : -2);
    const int pause = pause_.load(std::memory_order_relaxed);
    score_.store(std::clamp(score, 0, kScoreMax), std::memory_order_relaxed);
    if (score >= kScoreMax) {
      pause_.store(kPauseMin, std::memory_order_relaxed);
    } else if (score < 0) {
      left_out_.store(pause, std::memory_order_relaxed);
      pause_.store(std::min(pause * 2, kPauseMax), std::memory_order_relaxed);
    }
  }

 private:
  static constexpr int kScoreMax = 8;

  std::atomic<int> score_{0};
  std::atomic<int> pause_{kPauseMin};  // the next one, in occasions
  std::atomic<int> left_out_{0};       // occasions that are left of this one
};

}  // namespace polyhvd
