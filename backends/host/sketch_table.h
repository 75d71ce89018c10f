// The sums of sketches in one instruction set. Internal to sketch*.cc and their test;
// everyone else calls sketch.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "control/types.h"
#include "sketch.h"

namespace polyhvd::host {

// Rows of 64 elements that follow each other; see sketch_of().
struct SketchJob {
  const std::byte* from;
  const std::byte* less;  // read only by floats_less and doubles_less
  const std::uint64_t* signs;
  std::size_t rows;
  double* squares;  // 64 each; rows are added to them
  double* columns;
};
using SketchRows = void (*)(const SketchJob&);

struct SketchTable {
  const char* name;
  SketchRows floats;
  SketchRows floats_less;
  SketchRows doubles;
  SketchRows doubles_less;
};

// As those of kernels_table.h.
const SketchTable* baseline_sketches() noexcept;
const SketchTable* avx2_sketches() noexcept;
const SketchTable* avx512_sketches() noexcept;

// Those that this machine runs, the fastest last. Never empty.
std::span<const SketchTable* const> runnable_sketches() noexcept;

// sketch_of() by one of them.
Sketch sketch_by(const SketchTable& table, DType dtype, const std::byte* from, std::size_t count,
                 std::uint64_t begin, const std::byte* less, std::byte* copy) noexcept;

}  // namespace polyhvd::host
