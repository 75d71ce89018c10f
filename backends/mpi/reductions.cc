#include "mpi/reductions.h"

#include <array>
#include <cstddef>

#include "control/error.h"
#include "host/kernels.h"

namespace polyhvd::mpi {
namespace {

template <DType dtype, ReduceOp op>
void reduce_in_order(void* in, void* inout, int* count, void*) {
  auto* out = static_cast<std::byte*>(inout);
  const std::array<const std::byte*, 2> terms{static_cast<const std::byte*>(in), out};
  host::reduce(dtype, op, {}, terms, static_cast<std::size_t>(*count), out, nullptr);
}

template <DType dtype>
ReduceFunction function_for(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
      return &reduce_in_order<dtype, ReduceOp::kMin>;
    case ReduceOp::kMax:
      return &reduce_in_order<dtype, ReduceOp::kMax>;
    case ReduceOp::kProduct:
      return &reduce_in_order<dtype, ReduceOp::kProduct>;
    default:
      return &reduce_in_order<dtype, ReduceOp::kSum>;
  }
}

ReduceFunction function_for(DType dtype, ReduceOp op) {
  switch (dtype) {
    case DType::kFloat16:
      return function_for<DType::kFloat16>(op);
    case DType::kBfloat16:
      return function_for<DType::kBfloat16>(op);
    case DType::kFloat32:
      return function_for<DType::kFloat32>(op);
    case DType::kFloat64:
      return function_for<DType::kFloat64>(op);
    case DType::kUint8:
      return function_for<DType::kUint8>(op);
    case DType::kInt8:
      return function_for<DType::kInt8>(op);
    case DType::kInt16:
      return function_for<DType::kInt16>(op);
    case DType::kUint16:
      return function_for<DType::kUint16>(op);
    default:
      return function_for<DType::kBool>(op);
  }
}

bool is_half(DType dtype) { return dtype == DType::kFloat16 || dtype == DType::kBfloat16; }

bool is_float(DType dtype) {
  return is_half(dtype) || dtype == DType::kFloat32 || dtype == DType::kFloat64;
}

bool is_extreme(ReduceOp op) { return op == ReduceOp::kMin || op == ReduceOp::kMax; }

BuiltIn built_in(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
      return BuiltIn::kMin;
    case ReduceOp::kMax:
      return BuiltIn::kMax;
    case ReduceOp::kProduct:
      return BuiltIn::kProduct;
    default:
      return BuiltIn::kSum;
  }
}

}  // namespace

LibraryReduction Reductions::of(DType dtype, ReduceOp op, Scale scale) {
  const bool widens = is_half(dtype) && (!is_extreme(op) || scale != Scale{});
  const DType carried = widens ? host::accumulator_of(dtype) : dtype;
  // MPI leaves open what becomes of NaN and of zeros of both signs in a minimum, and has no
  // half types; its logical operations do not normalise bools, and Open MPI's sums of 8 and
  // 16 bits saturate on some machines instead of wrapping around.
  const bool kernels = is_float(carried) ? is_extreme(op) : item_size(carried) < 4;
  return {carried, library_.datatype(carried),
          kernels ? made_of_kernels(carried, op) : library_.operation(built_in(op))};
}

Handle Reductions::made_of_kernels(DType dtype, ReduceOp op) {
  const auto [it, is_new] = made_.try_emplace({dtype, op});
  // Of equal floats the first one counts: their order matters.
  if (is_new) it->second = library_.make_operation(function_for(dtype, op), !is_float(dtype));
  return it->second;
}

void Reductions::close() noexcept {
  for (const auto& [key, operation] : made_) library_.free_operation(operation);
  made_.clear();
}

}  // namespace polyhvd::mpi
