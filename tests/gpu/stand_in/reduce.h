// Arithmetic of the test double of NCCL: plain loops, in order of rank, with the numbers that
// nccl.h gives to types and operations.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "links.h"

namespace stand_in {

struct Bfloat16 {
  std::uint16_t bits = 0;
  Bfloat16() = default;
  Bfloat16(float value) {
    std::uint32_t wide = 0;
    std::memcpy(&wide, &value, sizeof wide);
    bits = static_cast<std::uint16_t>((wide + 0x7FFF + (wide >> 16 & 1)) >> 16);
  }
  operator float() const {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float value = 0;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }
};

// Calls `use` with a zero of the type.
template <class Use>
decltype(auto) with_type(int type, Use&& use) {
  switch (type) {
    case 0:
      return use(std::int8_t{});
    case 1:
      return use(std::uint8_t{});
    case 2:
      return use(std::int32_t{});
    case 3:
      return use(std::uint32_t{});
    case 4:
      return use(std::int64_t{});
    case 5:
      return use(std::uint64_t{});
    case 6:
      return use(_Float16{});
    case 7:
      return use(float{});
    case 8:
      return use(double{});
    case 9:
      return use(Bfloat16{});
    default:
      misuse("a data type", "NCCL has no such number");
  }
}

inline std::size_t size_of(int type) {
  return with_type(type, [](auto zero) { return sizeof zero; });
}

inline double number_at(int type, const void* data) {
  return with_type(type, [&](auto value) {
    std::memcpy(&value, data, sizeof value);
    return static_cast<double>(value);
  });
}

inline void scale(int type, std::vector<std::byte>& term, double factor) {
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    auto* values = reinterpret_cast<T*>(term.data());
    for (std::size_t i = 0; i < term.size() / sizeof(T); ++i) {
      values[i] = static_cast<T>(static_cast<T>(factor) * values[i]);
    }
  });
}

// Sum 0, product 1, maximum 2, minimum 3.
inline std::vector<std::byte> reduce(int type, int op,
                                     const std::vector<std::vector<std::byte>>& terms) {
  std::vector<std::byte> result = terms[0];
  with_type(type, [&](auto zero) {
    using T = decltype(zero);
    auto* out = reinterpret_cast<T*>(result.data());
    for (std::size_t r = 1; r < terms.size(); ++r) {
      const auto* in = reinterpret_cast<const T*>(terms[r].data());
      for (std::size_t i = 0; i < result.size() / sizeof(T); ++i) {
        if (op == 0) out[i] = static_cast<T>(out[i] + in[i]);
        if (op == 1) out[i] = static_cast<T>(out[i] * in[i]);
        if (op == 2) out[i] = std::max(out[i], in[i]);
        if (op == 3) out[i] = std::min(out[i], in[i]);
      }
    }
  });
  return result;
}

}  // namespace stand_in
