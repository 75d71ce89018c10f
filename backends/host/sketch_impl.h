// The sums of one instruction set: included once by each sketch_<set>.cc, after the pragma
// that selects it. Calls no library function; see kernels_impl.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sketch_table.h"

#if !defined(POLYHVD_VECTOR_BYTES)
#define POLYHVD_VECTOR_BYTES 16
#endif

namespace polyhvd::host {
namespace {

constexpr std::size_t kColumns = 64;
constexpr std::size_t kLanes = POLYHVD_VECTOR_BYTES / sizeof(double);
// So many columns are summed up at once as fit into registers.
constexpr std::size_t kParts = kLanes == 8 ? 8 : 4;
constexpr std::size_t kGroup = kParts * kLanes;

template <class T>
struct LanesOf {
  typedef T Type __attribute__((vector_size(kLanes * sizeof(T))));
  typedef Type InMemory __attribute__((aligned(1), may_alias));
};
using Doubles = LanesOf<double>::Type;
using Words = LanesOf<std::uint64_t>::Type;

template <class T>
[[gnu::always_inline]] inline Doubles load(const std::byte* from) {
  using InMemory = typename LanesOf<T>::InMemory;
  return __builtin_convertvector(*reinterpret_cast<const InMemory*>(from), Doubles);
}

// The bits of a row's signs from column `first` on, each in the place of a double's sign.
[[gnu::always_inline]] inline Words signs_from(std::uint64_t row, std::size_t first) {
  constexpr std::uint64_t kSign = std::uint64_t{1} << 63;
  if constexpr (kLanes == 2) {  // SSE2 cannot shift each lane by a different number
    static constexpr std::uint64_t kMasks[4][2] = {{0, 0}, {kSign, 0}, {0, kSign}, {kSign, kSign}};
    const auto& mask = kMasks[(row >> first) & 3];
    return Words{mask[0], mask[1]};
  } else {
    Words shift;
    for (std::size_t lane = 0; lane < kLanes; ++lane) shift[lane] = 63 - first - lane;
    return ((Words{} + row) << shift) & kSign;
  }
}

template <class T, bool is_less>
[[gnu::always_inline]] inline void sum_group(const SketchJob& job, std::size_t first) {
  constexpr std::size_t kRow = kColumns * sizeof(T);
  using InMemory = LanesOf<double>::InMemory;
  Doubles squares[kParts];
  Doubles columns[kParts];
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kParts; ++i) {
    squares[i] = *reinterpret_cast<const InMemory*>(job.squares + first + i * kLanes);
    columns[i] = *reinterpret_cast<const InMemory*>(job.columns + first + i * kLanes);
  }
  for (std::size_t row = 0; row < job.rows; ++row) {
    const std::size_t at = row * kRow + first * sizeof(T);
#pragma GCC unroll 8
    for (std::size_t i = 0; i < kParts; ++i) {
      Doubles v = load<T>(job.from + at + i * kLanes * sizeof(T));
      if constexpr (is_less) v -= load<T>(job.less + at + i * kLanes * sizeof(T));
      squares[i] += v * v;
      columns[i] += Doubles(Words(v) ^ signs_from(job.signs[row], first + i * kLanes));
    }
  }
#pragma GCC unroll 8
  for (std::size_t i = 0; i < kParts; ++i) {
    *reinterpret_cast<InMemory*>(job.squares + first + i * kLanes) = squares[i];
    *reinterpret_cast<InMemory*>(job.columns + first + i * kLanes) = columns[i];
  }
}

template <class T, bool is_less>
void sum_rows(const SketchJob& job) {
#pragma GCC unroll 8
  for (std::size_t first = 0; first < kColumns; first += kGroup) sum_group<T, is_less>(job, first);
}

constexpr SketchTable make_sketches(const char* name) {
  return {name, sum_rows<float, false>, sum_rows<float, true>, sum_rows<double, false>,
          sum_rows<double, true>};
}

}  // namespace
}  // namespace polyhvd::host
