// A clock that costs a few nanoseconds to read, for times that are taken on every
// operation and looked at for few: the processor's counter where it runs at a
// constant rate, else the steady clock.
#pragma once

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

namespace polyhvd {

using Ticks = std::uint64_t;

inline std::int64_t steady_ns() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

#if defined(__x86_64__)
// CPUID's "invariant TSC": the rate does not change, and cores agree.
inline const bool kInvariantCounter = [] {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) != 0 && (d >> 8 & 1) != 0;
}();
inline Ticks ticks_now() noexcept {
  return kInvariantCounter ? __rdtsc() : static_cast<Ticks>(steady_ns());
}
#elif defined(__aarch64__)
inline Ticks ticks_now() noexcept {
  Ticks ticks;
  asm volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
}
#else
inline Ticks ticks_now() noexcept { return static_cast<Ticks>(steady_ns()); }
#endif

// The same moment on both clocks.
struct TickAnchor {
  Ticks ticks = ticks_now();
  std::int64_t ns = steady_ns();
};

// Turns ticks into nanoseconds of the steady clock, by two anchors. Exact at the
// later one, so it is computed again when times are read.
class TickScale {
 public:
  explicit TickScale(const TickAnchor& first, const TickAnchor& last = {}) noexcept : last_(last) {
    const auto ticks = static_cast<double>(last.ticks - first.ticks);
    if (ticks > 0) ns_per_tick_ = static_cast<double>(last.ns - first.ns) / ticks;
  }
  std::int64_t ns(Ticks ticks) const noexcept {
    const auto ago = static_cast<std::int64_t>(last_.ticks - ticks);  // may be in the future
    return last_.ns - length_ns(ago);
  }
  std::int64_t length_ns(std::int64_t ticks) const noexcept {
    return static_cast<std::int64_t>(static_cast<double>(ticks) * ns_per_tick_);
  }

  double ns_per_tick() const noexcept { return ns_per_tick_; }

 private:
  TickAnchor last_;
  double ns_per_tick_ = 1.0;
};

}  // namespace polyhvd
