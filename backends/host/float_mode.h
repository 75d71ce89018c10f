// The floating-point mode in which kernels run, whatever the calling thread has set.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#else
#include <cfenv>
#endif

namespace polyhvd::host {

// Frameworks set flush-to-zero in some of their threads and not in others, and
// which thread reduces is a matter of timing. The result must not be.
class DefaultFloatMode {
 public:
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;
#if defined(__x86_64__)
  DefaultFloatMode() noexcept : saved_(_mm_getcsr()) {
    if ((saved_ & ~kExceptionFlags) != kDefault) _mm_setcsr(kDefault);
  }
  ~DefaultFloatMode() {
    if ((saved_ & ~kExceptionFlags) != kDefault) _mm_setcsr(saved_);
  }

 private:
  static constexpr unsigned kExceptionFlags = 0x3f;
  static constexpr unsigned kDefault = 0x1f80;
  unsigned saved_;
#else
  DefaultFloatMode() noexcept {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloatMode() { std::fesetenv(&saved_); }

 private:
  std::fenv_t saved_;
#endif
};

}  // namespace polyhvd::host
