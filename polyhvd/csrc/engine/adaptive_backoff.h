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

  // Called before each attempt; after true, call note() with its result.
  bool worth_it() noexcept {
    const int skips = skips_.load(std::memory_order_relaxed);
    if (skips == 0) return true;
    skips_.store(skips - 1, std::memory_order_relaxed);
    return false;
  }

  void note(bool worked) noexcept {
    const int score = score_.load(std::memory_order_relaxed) + (worked ? 1 : -2);
    const int pause = pause_.load(std::memory_order_relaxed);
    score_.store(std::clamp(score, 0, kScoreMax), std::memory_order_relaxed);
    if (score >= kScoreMax) {
      pause_.store(kPauseMin, std::memory_order_relaxed);
    } else if (score < 0) {
      skips_.store(pause, std::memory_order_relaxed);
      pause_.store(std::min(pause * 2, kPauseMax), std::memory_order_relaxed);
    }
  }

 private:
  static constexpr int kScoreMax = 8;

  std::atomic<int> score_{0};
  std::atomic<int> pause_{kPauseMin};  // the next one, in attempts
  std::atomic<int> skips_{0};          // attempts that this pause still skips
};

}  // namespace polyhvd
