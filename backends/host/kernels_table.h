// The reductions of one instruction set as a table of functions. Internal to
// kernels*.cc, their test and their benchmark; everyone else calls kernels.h.
#pragma once

#include <cstddef>
#include <span>

#include "control/types.h"

namespace polyhvd::host {

// What one kernel call works on; see reduce() for the meaning of each field.
struct KernelJob {
  double pre;
  double post;
  const std::byte* const* sources;
  std::size_t source_count;
  std::size_t count;
  std::byte* out;
  std::byte* copy;
};
using Kernel = void (*)(const KernelJob&);

inline constexpr int kKernelOpCount = 4;

// Sum, min, max and product are the columns, in this order.
constexpr int kernel_column(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::kSum:
      return 0;
    case ReduceOp::kMin:
      return 1;
    case ReduceOp::kMax:
      return 2;
    case ReduceOp::kProduct:
      return 3;
    case ReduceOp::kAverage:
    case ReduceOp::kAdasum:
      break;
  }
  return -1;
}

// A row per dtype. The rows of types that are their own accumulator hold the
// same functions in all three tables.
struct KernelTable {
  const char* name;
  Kernel reduce[kDTypeCount][kKernelOpCount];
  Kernel to_partial[kDTypeCount][kKernelOpCount];
  Kernel from_partial[kDTypeCount][kKernelOpCount];
};

// Null where the compiler's target has no such instructions. What they return
// may only be called on a machine that has them.
const KernelTable* baseline_table() noexcept;
const KernelTable* avx2_table() noexcept;
const KernelTable* avx512_table() noexcept;
const KernelTable* avx512_bf16_table() noexcept;

// Those that this machine runs, the fastest last. Never empty.
std::span<const KernelTable* const> runnable_tables() noexcept;

}  // namespace polyhvd::host
