// The AVX-512 kernels, with others for bfloat16 that use the machine's own
// conversion. As to the order of headers and pragma see kernels_avx2.cc.
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
#pragma clang attribute push(                                                           \
    __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16"))), \
    apply_to = function)
#else
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")
#endif
#define POLYHVD_VECTOR_BYTES 64
#define POLYHVD_AVX512_BF16
#include "kernels_impl.h"

namespace polyhvd::host {

const KernelTable* avx512_bf16_table() noexcept {
  static const KernelTable kTable = [] {
    KernelTable table = *avx512_table();
    table.name = "avx512_bf16";
    fill<PackedBfloat16, PackedBfloat16>(table.reduce[static_cast<int>(DType::kBfloat16)]);
    return table;
  }();
  return &kTable;
}

}  // namespace polyhvd::host

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace polyhvd::host {

const KernelTable* avx512_bf16_table() noexcept { return nullptr; }

}  // namespace polyhvd::host

#endif
