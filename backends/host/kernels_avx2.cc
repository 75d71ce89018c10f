// The kernels for x86-64 machines with AVX2 and F16C. All headers come before the
// pragma: their inline functions are shared with code that runs on any machine.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels_table.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif
#define POLYHVD_VECTOR_BYTES 32
#include "kernels_impl.h"

namespace polyhvd::host {

const KernelTable* avx2_table() noexcept {
  static constexpr KernelTable kTable = make_table("avx2");
  return &kTable;
}

}  // namespace polyhvd::host

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace polyhvd::host {

const KernelTable* avx2_table() noexcept { return nullptr; }

}  // namespace polyhvd::host

#endif
