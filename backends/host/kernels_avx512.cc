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

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define POLYHVD_VECTOR_BYTES 64
#include "kernels_impl.h"

namespace polyhvd::host {

const KernelTable* avx512_table() noexcept {
  static constexpr KernelTable kTable = make_table("avx512");
  return &kTable;
}

}  // namespace polyhvd::host

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace polyhvd::host {

const KernelTable* avx512_table() noexcept { return nullptr; }

}  // namespace polyhvd::host

#endif
