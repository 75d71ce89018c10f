// The arithmetic of Adasum (Maleki et al., "Scaling Distributed Training with
// Adaptive Summation", MLSys 2021): two gradients are added as far as they are
// orthogonal, and averaged as far as they are parallel. Pure.
#pragma once

#include <cstddef>
#include <span>

#include "control/types.h"

namespace polyhvd::host {

// Dot products of two vectors, or of the parts of them that a rank holds.
struct InnerProducts {
  double ab = 0;
  double aa = 0;
  double bb = 0;
};
static_assert(sizeof(InnerProducts) == 3 * sizeof(double), "summed over ranks as they lie");

// Whether Adasum is defined for a type: the floating ones.
bool supports_adasum(DType dtype) noexcept;

// `dtype` is kFloat32 or kFloat64. In double, and in an order that depends only on `count`.
InnerProducts inner_products(DType dtype, const std::byte* a, const std::byte* b,
                             std::size_t count) noexcept;

// a = (1 - ab / 2aa) a + (1 - ab / 2bb) b; a vector of zeros adds nothing.
void add_adaptively(DType dtype, std::byte* a, const std::byte* b, std::size_t count,
                    const InnerProducts& products) noexcept;

}  // namespace polyhvd::host
