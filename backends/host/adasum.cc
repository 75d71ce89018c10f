#include "host/adasum.h"

#include <array>

namespace polyhvd::host {
namespace {

// Sums that do not wait for each other.
constexpr std::size_t kLanes = 8;

template <class T>
InnerProducts products_of(const T* a, const T* b, std::size_t count) noexcept {
  std::array<InnerProducts, kLanes> lanes;
  for (std::size_t i = 0; i < count; ++i) {
    InnerProducts& lane = lanes[i % kLanes];
    const auto x = static_cast<double>(a[i]);
    const auto y = static_cast<double>(b[i]);
    lane.ab += x * y;
    lane.aa += x * x;
    lane.bb += y * y;
  }
  InnerProducts sum;
  for (const InnerProducts& lane : lanes) {
    sum.ab += lane.ab;
    sum.aa += lane.aa;
    sum.bb += lane.bb;
  }
  return sum;
}

template <class T>
void add_scaled(T* a, const T* b, std::size_t count, double weight_a, double weight_b) noexcept {
  for (std::size_t i = 0; i < count; ++i) {
    a[i] =
        static_cast<T>(weight_a * static_cast<double>(a[i]) + weight_b * static_cast<double>(b[i]));
  }
}

}  // namespace

bool supports_adasum(DType dtype) noexcept {
  return dtype == DType::kFloat16 || dtype == DType::kBfloat16 || dtype == DType::kFloat32 ||
         dtype == DType::kFloat64;
}

InnerProducts inner_products(DType dtype, const std::byte* a, const std::byte* b,
                             std::size_t count) noexcept {
  if (dtype == DType::kFloat64) {
    return products_of(reinterpret_cast<const double*>(a), reinterpret_cast<const double*>(b),
                       count);
  }
  return products_of(reinterpret_cast<const float*>(a), reinterpret_cast<const float*>(b), count);
}

void add_adaptively(DType dtype, std::byte* a, const std::byte* b, std::size_t count,
                    const InnerProducts& products) noexcept {
  const double weight_a = products.aa > 0 ? 1 - products.ab / (2 * products.aa) : 1;
  const double weight_b = products.bb > 0 ? 1 - products.ab / (2 * products.bb) : 1;
  if (dtype == DType::kFloat64) {
    add_scaled(reinterpret_cast<double*>(a), reinterpret_cast<const double*>(b), count, weight_a,
               weight_b);
  } else {
    add_scaled(reinterpret_cast<float*>(a), reinterpret_cast<const float*>(b), count, weight_a,
               weight_b);
  }
}

}  // namespace polyhvd::host
