// Sizes and names of the core's vocabulary.
#include "control/types.h"

#include <algorithm>
#include <charconv>

namespace polyhvd {

std::size_t item_size(DType dtype) noexcept {
  switch (dtype) {
    case DType::kUint8:
    case DType::kInt8:
    case DType::kBool:
      return 1;
    case DType::kInt16:
    case DType::kUint16:
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    case DType::kInt32:
    case DType::kUint32:
    case DType::kFloat32:
      return 4;
    case DType::kInt64:
    case DType::kUint64:
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

std::string_view name_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kUint8:
      return "uint8";
    case DType::kInt8:
      return "int8";
    case DType::kInt16:
      return "int16";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kFloat16:
      return "float16";
    case DType::kBfloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
    case DType::kBool:
      return "bool";
    case DType::kUint16:
      return "uint16";
    case DType::kUint32:
      return "uint32";
    case DType::kUint64:
      return "uint64";
  }
  return "unknown";
}

TurnName::TurnName(OpKind kind, Turn turn) noexcept {
  constexpr std::string_view kUnnamed = ".noname.";
  const std::string_view verb = name_of(kind);
  char* at = std::copy(verb.begin(), verb.end(), text_);
  at = std::copy(kUnnamed.begin(), kUnnamed.end(), at);
  at = std::to_chars(at, text_ + sizeof text_, turn - 1).ptr;
  size_ = static_cast<std::size_t>(at - text_);
}

std::string_view name_of(OpKind kind) noexcept {
  switch (kind) {
    case OpKind::kAllreduce:
      return "allreduce";
    case OpKind::kAllgather:
      return "allgather";
    case OpKind::kBroadcast:
      return "broadcast";
    case OpKind::kBarrier:
      return "barrier";
    case OpKind::kAlltoall:
      return "alltoall";
    case OpKind::kReducescatter:
      return "reducescatter";
    case OpKind::kJoin:
      return "join";
    case OpKind::kAddProcessSet:
      return "add_process_set";
    case OpKind::kRemoveProcessSet:
      return "remove_process_set";
  }
  return "unknown";
}

std::string_view name_of(ReduceOp op) noexcept {
  switch (op) {
    case ReduceOp::kAverage:
      return "Average";
    case ReduceOp::kSum:
      return "Sum";
    case ReduceOp::kAdasum:
      return "Adasum";
    case ReduceOp::kMin:
      return "Min";
    case ReduceOp::kMax:
      return "Max";
    case ReduceOp::kProduct:
      return "Product";
  }
  return "unknown";
}

std::int64_t element_count(std::span<const std::int64_t> shape) noexcept {
  std::int64_t count = 1;
  for (const std::int64_t dimension : shape) count *= dimension;
  return count;
}

}  // namespace polyhvd
