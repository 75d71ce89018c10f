// The sums of sketches for x86-64 machines with AVX-512 F, BW, DQ and VL. As to the order of
// headers and pragma see kernels_avx2.cc.
#include <cstddef>
#include <cstdint>

#include "sketch_table.h"

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push( \
    __attribute__((target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define POLYHVD_VECTOR_BYTES 64
#include "sketch_impl.h"

namespace polyhvd::host {

const SketchTable* avx512_sketches() noexcept {
  static constexpr SketchTable kTable = make_sketches("avx512");
  return &kTable;
}

}  // namespace polyhvd::host

#if defined(__clang__)
#pragma clang attribute pop
#endif

#else

namespace polyhvd::host {

const SketchTable* avx512_sketches() noexcept { return nullptr; }

}  // namespace polyhvd::host

#endif
