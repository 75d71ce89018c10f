// What kernels.h promises, computed one element at a time and written from its
// comments alone: shares no code with the kernels.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "host/kernels.h"

namespace polyhvd::host::oracle {

using Bytes = std::vector<std::byte>;

// A float format of 16 bits, by arithmetic on values rather than on bits.
struct HalfFormat {
  int mantissa_bits;
  int least_exponent;  // of the least normal number
  double most;         // the greatest finite number

  double decode(std::uint16_t bits) const {
    const int exponent_bits = 15 - mantissa_bits;
    const double sign = bits & 0x8000 ? -1.0 : 1.0;
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    if (exponent == (1 << exponent_bits) - 1)
      return mantissa != 0 ? std::nan("") : sign * std::numeric_limits<double>::infinity();
    const int implicit = exponent == 0 ? 0 : 1 << mantissa_bits;
    const int scale = least_exponent - mantissa_bits + (exponent == 0 ? 0 : exponent - 1);
    return sign * std::ldexp(implicit + mantissa, scale);
  }

  std::uint16_t encode(double value) const {
    const int exponent_bits = 15 - mantissa_bits;
    const int infinity = ((1 << exponent_bits) - 1) << mantissa_bits;
    if (std::isnan(value)) return static_cast<std::uint16_t>(infinity | 1 << (mantissa_bits - 1));
    const int sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    if (std::isinf(value)) return static_cast<std::uint16_t>(sign | infinity);
    const int exponent =
        magnitude == 0 ? least_exponent : std::max(std::ilogb(magnitude), least_exponent);
    const double quantum = std::ldexp(1.0, exponent - mantissa_bits);
    const double rounded = std::nearbyint(magnitude / quantum) * quantum;
    if (rounded > most) return static_cast<std::uint16_t>(sign | infinity);
    for (int e = least_exponent;; ++e) {
      if (rounded >= std::ldexp(1.0, e + 1)) continue;
      const int mantissa = static_cast<int>(std::ldexp(rounded, mantissa_bits - e));
      const int biased = (e - least_exponent) << mantissa_bits;
      return static_cast<std::uint16_t>(sign | (biased + mantissa));
    }
  }
};
inline const HalfFormat kFloat16Format = {10, -14, 65504.0};
inline const HalfFormat kBfloat16Format = {7, -126, std::ldexp(255.0, 120)};

inline const HalfFormat& format_of(DType dtype) {
  return dtype == DType::kFloat16 ? kFloat16Format : kBfloat16Format;
}

template <class T>
T scaled(T value, double factor) {
  if (factor == 1.0) return value;
  if constexpr (std::is_floating_point_v<T>) {
    return value * static_cast<T>(factor);
  } else {
    const double exact = std::trunc(static_cast<double>(value) * factor);
    const double bound = std::ldexp(1.0, std::numeric_limits<T>::digits);
    if (std::isnan(exact) || exact < static_cast<double>(std::numeric_limits<T>::min()))
      return std::numeric_limits<T>::min();
    return exact >= bound ? std::numeric_limits<T>::max() : static_cast<T>(exact);
  }
}

template <class T>
T combined(ReduceOp op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (op == ReduceOp::kSum) return a + b;
    if (op == ReduceOp::kProduct) return a * b;
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  } else {
    const std::uint64_t x = static_cast<std::uint64_t>(a);
    const std::uint64_t y = static_cast<std::uint64_t>(b);
    if (op == ReduceOp::kSum) return static_cast<T>(x + y);
    if (op == ReduceOp::kProduct) return static_cast<T>(x * y);
  }
  if (op == ReduceOp::kMin) return b < a ? b : a;
  return b > a ? b : a;
}

template <class T>
T folded(ReduceOp op, Scale scale, const std::vector<T>& terms) {
  T total = scaled(terms[0], scale.pre);
  for (std::size_t s = 1; s < terms.size(); ++s)
    total = combined(op, total, scaled(terms[s], scale.pre));
  total = scaled(total, scale.post);
  if constexpr (std::is_floating_point_v<T>)
    if (std::isnan(total)) return std::numeric_limits<T>::quiet_NaN();
  return total;
}

enum class Stage { kReduce, kToPartial, kFromPartial };

inline DType input_type(Stage stage, DType dtype) {
  return stage == Stage::kFromPartial ? accumulator_of(dtype) : dtype;
}

inline DType output_type(Stage stage, DType dtype) {
  return stage == Stage::kToPartial ? accumulator_of(dtype) : dtype;
}

template <class T>
T get(const std::byte* from, std::size_t i) {
  T value;
  std::memcpy(&value, from + i * sizeof value, sizeof value);
  return value;
}

template <class T>
void put(Bytes& to, std::size_t i, T value) {
  std::memcpy(to.data() + i * sizeof value, &value, sizeof value);
}

template <class T>
void expect_native(ReduceOp op, Scale scale, const std::vector<const std::byte*>& sources,
                   std::size_t count, Bytes& out) {
  std::vector<T> terms(sources.size());
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t s = 0; s < terms.size(); ++s) terms[s] = get<T>(sources[s], i);
    put(out, i, folded(op, scale, terms));
  }
}

inline void expect_half(Stage stage, DType dtype, ReduceOp op, Scale scale,
                        const std::vector<const std::byte*>& sources, std::size_t count,
                        Bytes& out) {
  const HalfFormat& format = format_of(dtype);
  std::vector<float> terms(sources.size());
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t s = 0; s < terms.size(); ++s)
      terms[s] = stage == Stage::kFromPartial
                     ? get<float>(sources[s], i)
                     : static_cast<float>(format.decode(get<std::uint16_t>(sources[s], i)));
    const float total = folded(op, scale, terms);
    if (stage == Stage::kToPartial)
      put(out, i, total);
    else
      put(out, i, format.encode(total));
  }
}

inline void expect_bool(ReduceOp op, Scale scale, const std::vector<const std::byte*>& sources,
                        std::size_t count, Bytes& out) {
  const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax;
  std::vector<std::uint8_t> terms(sources.size());
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t s = 0; s < terms.size(); ++s) terms[s] = get<std::uint8_t>(sources[s], i) != 0;
    const auto total = folded(any ? ReduceOp::kMax : ReduceOp::kMin, scale, terms);
    out[i] = std::byte{total != 0};
  }
}

inline Bytes expected(Stage stage, DType dtype, ReduceOp op, Scale scale,
                      const std::vector<const std::byte*>& sources, std::size_t count) {
  Bytes out(count * item_size(output_type(stage, dtype)));
  switch (dtype) {
    case DType::kUint8:
      expect_native<std::uint8_t>(op, scale, sources, count, out);
      break;
    case DType::kInt8:
      expect_native<std::int8_t>(op, scale, sources, count, out);
      break;
    case DType::kInt16:
      expect_native<std::int16_t>(op, scale, sources, count, out);
      break;
    case DType::kInt32:
      expect_native<std::int32_t>(op, scale, sources, count, out);
      break;
    case DType::kInt64:
      expect_native<std::int64_t>(op, scale, sources, count, out);
      break;
    case DType::kUint16:
      expect_native<std::uint16_t>(op, scale, sources, count, out);
      break;
    case DType::kUint32:
      expect_native<std::uint32_t>(op, scale, sources, count, out);
      break;
    case DType::kUint64:
      expect_native<std::uint64_t>(op, scale, sources, count, out);
      break;
    case DType::kFloat32:
      expect_native<float>(op, scale, sources, count, out);
      break;
    case DType::kFloat64:
      expect_native<double>(op, scale, sources, count, out);
      break;
    case DType::kFloat16:
    case DType::kBfloat16:
      expect_half(stage, dtype, op, scale, sources, count, out);
      break;
    case DType::kBool:
      expect_bool(op, scale, sources, count, out);
      break;
  }
  return out;
}

}  // namespace polyhvd::host::oracle
