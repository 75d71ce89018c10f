#include "nccl/reductions.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace polyhvd::nccl {
namespace {

// Nothing below the smallest normal number, where digits would be lost.
std::optional<std::uint16_t> float16_of(double factor) {
  constexpr double kSmallest = 0x1p-14, kLargest = 65504;
  const double size = std::abs(factor);
  if (!(size >= kSmallest && size <= kLargest)) return std::nullopt;
  int exponent = std::ilogb(size);
  auto digits = static_cast<unsigned>(std::nearbyint(std::ldexp(size, 10 - exponent)));
  if (digits == 2048) digits = 1024, ++exponent;
  const unsigned sign = factor < 0 ? 0x8000 : 0;
  return static_cast<std::uint16_t>(sign | static_cast<unsigned>(exponent + 15) << 10 |
                                    (digits - 1024));
}

std::optional<float> float32_of(double factor) {
  const auto narrow = static_cast<float>(factor);
  if (!std::isnormal(narrow)) return std::nullopt;
  return narrow;
}

std::optional<std::uint16_t> bfloat16_of(double factor) {
  const auto narrow = float32_of(factor);
  if (!narrow) return std::nullopt;
  const auto bits = std::bit_cast<std::uint32_t>(*narrow);
  const std::uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  if (!std::isfinite(std::bit_cast<float>(rounded << 16))) return std::nullopt;
  return static_cast<std::uint16_t>(rounded);
}

template <class T>
std::optional<std::array<std::byte, 8>> bytes_of(const std::optional<T>& value) {
  if (!value) return std::nullopt;
  std::array<std::byte, 8> bytes{};
  std::memcpy(bytes.data(), &*value, sizeof *value);
  return bytes;
}

std::optional<std::array<std::byte, 8>> factor_in(DType dtype, double factor) {
  switch (dtype) {
    case DType::kFloat16:
      return bytes_of(float16_of(factor));
    case DType::kBfloat16:
      return bytes_of(bfloat16_of(factor));
    case DType::kFloat32:
      return bytes_of(float32_of(factor));
    case DType::kFloat64:
      return std::isnormal(factor) ? bytes_of(std::optional(factor)) : std::nullopt;
    default:
      return std::nullopt;
  }
}

std::optional<DataType> type_of(DType dtype) {
  switch (dtype) {
    case DType::kUint8:
    case DType::kBool:
      return DataType::kUint8;
    case DType::kInt8:
      return DataType::kInt8;
    case DType::kInt32:
      return DataType::kInt32;
    case DType::kUint32:
      return DataType::kUint32;
    case DType::kInt64:
      return DataType::kInt64;
    case DType::kUint64:
      return DataType::kUint64;
    case DType::kFloat16:
      return DataType::kFloat16;
    case DType::kBfloat16:
      return DataType::kBfloat16;
    case DType::kFloat32:
      return DataType::kFloat32;
    case DType::kFloat64:
      return DataType::kFloat64;
    case DType::kInt16:
    case DType::kUint16:
      return std::nullopt;
  }
  return std::nullopt;
}

std::optional<RedOp> operation_of(DType dtype, ReduceOp op) {
  const bool logical = dtype == DType::kBool;  // of bytes that are 0 or 1
  switch (op) {
    case ReduceOp::kSum:
      return logical ? RedOp::kMax : RedOp::kSum;
    case ReduceOp::kProduct:
      return logical ? RedOp::kMin : RedOp::kProd;
    case ReduceOp::kMin:
      return RedOp::kMin;
    case ReduceOp::kMax:
      return RedOp::kMax;
    default:
      return std::nullopt;
  }
}

}  // namespace

std::optional<LibraryReduction> reduction_of(DType dtype, ReduceOp op, Scale scale) {
  const auto type = type_of(dtype);
  const auto operation = operation_of(dtype, op);
  if (!type || !operation) return std::nullopt;
  LibraryReduction reduction{*type, *operation, std::nullopt};
  const double factor = scale.pre * scale.post;
  if (scale == Scale{} || (op == ReduceOp::kSum && factor == 1.0 && factor_in(dtype, 1.0))) {
    return reduction;
  }
  if (op == ReduceOp::kSum) reduction.factor = factor_in(dtype, factor);
  if (!reduction.factor) return std::nullopt;
  return reduction;
}

}  // namespace polyhvd::nccl
