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

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#pragma GCC target("avx2,f16c")
#define POLYHVD_VECTOR_BYTES 32
#include "kernels_impl.h"

namespace polyhvd::host {

const KernelTable* avx2_table() noexcept {
  static constexpr KernelTable kTable = make_table("avx2");
  return &kTable;
}

}  // namespace polyhvd::host

#else

namespace polyhvd::host {

const KernelTable* avx2_table() noexcept { return nullptr; }

}  // namespace polyhvd::host

#endif
