#include "engine/stand_in.h"

#include <cstring>
#include <limits>
#include <type_traits>

namespace polyhvd {
namespace {

template <class T>
void fill(std::byte* data, std::size_t count, T value) {
  for (std::size_t i = 0; i < count; ++i) std::memcpy(data + i * sizeof(T), &value, sizeof(T));
}

// Of a minimum the largest value is neutral; of a maximum, or where a negative factor
// turns them round, the least.
bool is_largest(ReduceOp op, const Scale& scale) {
  return (op == ReduceOp::kMin) == (scale.pre >= 0);
}

template <class T>
T neutral(ReduceOp op, const Scale& scale) {
  using Limits = std::numeric_limits<T>;
  switch (op) {
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      if constexpr (std::is_floating_point_v<T>) {
        return is_largest(op, scale) ? Limits::infinity() : -Limits::infinity();
      } else {
        return is_largest(op, scale) ? Limits::max() : Limits::min();
      }
    case ReduceOp::kProduct:
      return T{1};
    default:
      return std::is_floating_point_v<T> ? T(-0.0) : T{0};
  }
}

// The bits of a half type, whose exponent has all bits of `infinity`.
std::uint16_t neutral_half(ReduceOp op, const Scale& scale, std::uint16_t infinity,
                           std::uint16_t one) {
  constexpr std::uint16_t kSign = 0x8000;
  switch (op) {
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return is_largest(op, scale) ? infinity : static_cast<std::uint16_t>(infinity | kSign);
    case ReduceOp::kProduct:
      return one;
    default:
      return kSign;
  }
}

Shape input_shape(const Agreement& agreement, std::size_t i) {
  Shape shape = agreement.shapes[i];
  if (has_own_rows(agreement.kind)) shape[0] = 0;
  return shape;
}

}  // namespace

void fill_neutral(DType dtype, ReduceOp op, const Scale& scale, std::byte* data,
                  std::size_t count) {
  switch (dtype) {
    case DType::kUint8:
      return fill(data, count, neutral<std::uint8_t>(op, scale));
    case DType::kInt8:
      return fill(data, count, neutral<std::int8_t>(op, scale));
    case DType::kInt16:
      return fill(data, count, neutral<std::int16_t>(op, scale));
    case DType::kInt32:
      return fill(data, count, neutral<std::int32_t>(op, scale));
    case DType::kInt64:
      return fill(data, count, neutral<std::int64_t>(op, scale));
    case DType::kFloat16:
      return fill(data, count, neutral_half(op, scale, 0x7c00, 0x3c00));
    case DType::kBfloat16:
      return fill(data, count, neutral_half(op, scale, 0x7f80, 0x3f80));
    case DType::kFloat32:
      return fill(data, count, neutral<float>(op, scale));
    case DType::kFloat64:
      return fill(data, count, neutral<double>(op, scale));
    case DType::kBool:
      return fill(data, count, neutral<bool>(op, scale));
    case DType::kUint16:
      return fill(data, count, neutral<std::uint16_t>(op, scale));
    case DType::kUint32:
      return fill(data, count, neutral<std::uint32_t>(op, scale));
    case DType::kUint64:
      return fill(data, count, neutral<std::uint64_t>(op, scale));
  }
}

OperationPtr stand_in(const Agreement& agreement, int position) {
  Submission s;
  s.name = agreement.name;
  s.kind = agreement.kind;
  s.op = agreement.op;
  s.scale = agreement.scale;
  s.root = agreement.root;
  s.priority = agreement.priority;
  s.process_set = agreement.process_set;
  auto operation = std::make_shared<Operation>(std::move(s));
  operation->position = position;
  operation->announced = true;
  operation->stands_in = true;
  if (!has_tensors(agreement.kind)) return operation;
  for (std::size_t i = 0; i < agreement.shapes.size(); ++i) {
    const Shape shape = input_shape(agreement, i);
    const DType dtype = dtype_of(agreement, i);
    const auto count = static_cast<std::size_t>(element_count(shape));
    auto buffer = std::make_shared<OwnedBuffer>(shape, dtype, count * item_size(dtype));
    if (reduces(agreement.kind)) {
      fill_neutral(dtype, agreement.op, agreement.scale, buffer->data(), count);
    }
    operation->submission.inputs.push_back({buffer->data(), shape, dtype, {agreement.device, 0}});
    operation->inputs.push_back(std::move(buffer));
  }
  if (agreement.kind == OpKind::kAllreduce || agreement.kind == OpKind::kBroadcast) {
    operation->submission.outputs = operation->submission.inputs;
  }
  return operation;
}

}  // namespace polyhvd
