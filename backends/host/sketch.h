// A summary of a tensor, to estimate later how far two of them are apart. Pure; any thread.
//
// Element i belongs to row i / 64 and column i % 64. All is computed in double, each column
// from its first row to its last, and columns from the first to the last. So the result
// depends only on values and places, not on alignment or instruction set, nor on the
// flush-to-zero and rounding modes of the calling thread, which it keeps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "control/types.h"

namespace polyhvd::host {

inline constexpr std::size_t kSketchColumns = 64;

struct Sketch {
  double square = 0;                    // the sum of squares
  double columns[kSketchColumns] = {};  // sums of a column's elements, each with its sign
  std::uint64_t not_finite = 0;         // NaNs and infinities, which count as 0 in the sums
};

// Bit j is set where the sign of column j is minus. Each row has other signs, without
// a period.
constexpr std::uint64_t signs_of_row(std::uint64_t row) noexcept {
  // S. Vigna's SplitMix64, from the row as its state.
  std::uint64_t z = (row + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

// Of `count` elements of `dtype`, the first of which is element `begin` of the whole. Each
// is less the element of `less` there, unless that is null. All are written to `copy`
// unless it is null; that overlaps nothing. Pointers need no alignment.
Sketch sketch_of(DType dtype, const std::byte* from, std::size_t count, std::uint64_t begin,
                 const std::byte* less, std::byte* copy) noexcept;

}  // namespace polyhvd::host
