// What NCCL reduces as polyhvd means it, and how NCCL calls that. Pure.
#pragma once

#include <array>
#include <cstddef>
#include <optional>

#include "control/types.h"
#include "nccl/library.h"

namespace polyhvd::nccl {

struct LibraryReduction {
  DataType type = DataType::kFloat32;
  RedOp op = RedOp::kSum;
  // By which every term is multiplied before the sum: as a number of `type`.
  std::optional<std::array<std::byte, 8>> factor;
};

// Nothing where NCCL does not do it: 16-bit integers, Adasum, factors other than of a sum of
// floats, and factors that the type cannot hold. Depends only on its arguments.
std::optional<LibraryReduction> reduction_of(DType dtype, ReduceOp op, Scale scale);

}  // namespace polyhvd::nccl
