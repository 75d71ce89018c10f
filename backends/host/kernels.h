// Elementwise reductions over several ranks' contributions, vectorised for the
// machine at run time. Pure; any thread.
//
// Terms are added in the order of `sources`, from left to right, and half types
// are widened to float before and narrowed once after. So the result depends on
// only the order of the sources, not on count, alignment or instruction set, nor
// on the flush-to-zero and rounding modes of the calling thread, which it keeps.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "control/types.h"

namespace polyhvd::host {

// The type in which partial sums are kept: float32 for half types, else the
// type itself.
DType accumulator_of(DType dtype) noexcept;

// Whether `op` is defined for `dtype`. kBool knows kSum and kMax (or), kMin and
// kProduct (and). kAverage is never supported: it is kSum with a postscale.
bool supports(DType dtype, ReduceOp op) noexcept;

// out[i] = post * (pre * sources[0][i] op pre * sources[1][i] op ...), for
// `count` elements of `dtype`. Also stored to `copy` unless it is null. `out`
// and `copy` may each be one of the sources, and overlap nothing otherwise.
// `sources` is never empty. A factor of exactly 1 is not applied.
// Floats: every NaN that comes out is the positive quiet one without payload. Min and
// max are NumPy's minimum and maximum: NaN if any term is NaN; of equal terms (0.0 and
// -0.0) the first one.
// Integers: they wrap around. Each scaled value is computed in double and truncated towards
// zero; out of range it becomes the type's nearest end, and NaN its least value.
// Bools: read as 0 or 1, scaled like integers, and true unless the result is 0.
// Pointers need no alignment.
void reduce(DType dtype, ReduceOp op, Scale scale, std::span<const std::byte* const> sources,
            std::size_t count, std::byte* out, std::byte* copy);

// The two halves of reduce(), for partial results that cross hosts:
// partial[i] = pre * sources[0][i] op ..., in accumulator_of(dtype) ...
void reduce_to_partial(DType dtype, ReduceOp op, double prescale,
                       std::span<const std::byte* const> sources, std::size_t count,
                       std::byte* partial);
// ... and out[i] = post * (partials[0][i] op partials[1][i] op ...).
void combine_partials(DType dtype, ReduceOp op, double postscale,
                      std::span<const std::byte* const> partials, std::size_t count, std::byte* out,
                      std::byte* copy);

// "avx512_bf16", "avx512", "avx2" or "baseline": what this machine runs.
std::string_view instruction_set() noexcept;

}  // namespace polyhvd::host
