// The kernels for x86-64 machines with AVX-512 F, BW, DQ and VL. As to the
// order of headers and pragma see kernels_avx2.cc.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels_table.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#define POLYHVD_VECTOR_BYTES 64
#include "kernels_impl.h"

namespace polyhvd::host {

const KernelTable* avx512_table() noexcept {
  static constexpr KernelTable kTable = make_table("avx512");
  return &kTable;
}

}  // namespace polyhvd::host

#else

namespace polyhvd::host {

const KernelTable* avx512_table() noexcept { return nullptr; }

}  // namespace polyhvd::host

#endif
