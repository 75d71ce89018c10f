// The arrays of a call: which are refused before the operation is passed to MXNet's engine, and
// how they are described to it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "control/error.h"
#include "control/types.h"
#include "library.h"
#include "mxnet_c_api.h"
#include "operation.h"

namespace polyhvd::mxnet {

inline std::string to_string(const Shape& shape) {
  std::string text = "[";
  for (const std::int64_t dim : shape) text += (text.size() > 1 ? ", " : "") + std::to_string(dim);
  return text + "]";
}

// A bad call that can be seen before MXNet's engine runs the operation.
[[noreturn]] inline void refuse(const std::string& why) {
  throw Failure(ErrorCode::kInvalidArgument, why);
}

inline Shape shape_of(NDArrayHandle array) {
  int storage = -1;
  check(g_mx.MXNDArrayGetStorageType(array, &storage));
  if (storage < 0) refuse("the array has no shape yet; compute it, or initialize() first");
  if (storage != kDefaultStorage) {
    refuse("a sparse array is not possible here; use tostype('default')");
  }
  int dev_type = 0;
  int dev_id = 0;
  check(g_mx.MXNDArrayGetContext(array, &dev_type, &dev_id));
  if (dev_type != kDevCpu && dev_type != kDevCpuPinned && dev_type != kDevCpuShared) {
    refuse("the array lies on a GPU; use as_in_context(mx.cpu()) first");
  }
  int ndim = -1;
  const std::int64_t* dims = nullptr;
  check(g_mx.MXNDArrayGetShapeEx64(array, &ndim, &dims));
  if (ndim < 0 || std::any_of(dims, dims + ndim, [](std::int64_t d) { return d < 0; })) {
    refuse("the shape of the array is not known yet; initialize() it first");
  }
  return Shape(dims, dims + ndim);
}

inline void take_inputs(Op& op, std::span<const NDArrayHandle> inputs) {
  const bool averages = reduces(static_cast<OpKind>(op.submission.kind)) &&
                        static_cast<ReduceOp>(op.submission.op) == ReduceOp::kAverage;
  op.shapes.reserve(inputs.size());
  op.dtypes.reserve(inputs.size());
  op.inputs.reserve(inputs.size());
  for (const NDArrayHandle input : inputs) {
    op.shapes.push_back(shape_of(input));
    const int dtype = dtype_of(input);
    if (dtype < 0) refuse("the element type is not supported; cast the array");
    if (averages && static_cast<DType>(dtype) == DType::kBool) {
      refuse("the average of bool is not defined; cast it, or use Min or Max");
    }
    op.dtypes.push_back(dtype);
    op.inputs.emplace_back(input);
  }
}

inline void take_outputs(Op& op, std::span<const NDArrayHandle> outputs) {
  const auto kind = static_cast<OpKind>(op.submission.kind);
  const bool keeps_shape = kind == OpKind::kAllreduce || kind == OpKind::kBroadcast;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    op.shapes.push_back(shape_of(outputs[i]));
    if ((keeps_shape && op.shapes.back() != op.shapes[i]) || dtype_of(outputs[i]) != op.dtypes[i]) {
      refuse("the output has shape " + to_string(op.shapes.back()) + ", the input " +
             to_string(op.shapes[i]) + ", or their types differ");
    }
    op.outputs.emplace_back(outputs[i]);
  }
}

// The arrays without those whose memory is in `others` or came before: MXNet
// never runs an operation that names the same memory twice.
inline std::vector<NDArrayHandle> distinct(const std::vector<Array>& arrays,
                                           const std::vector<NDArrayHandle>& others) {
  std::vector<const void*> seen;
  std::vector<NDArrayHandle> kept;
  seen.reserve(others.size() + arrays.size());
  kept.reserve(arrays.size());
  for (const NDArrayHandle other : others) seen.push_back(chunk_of(other));
  for (const Array& array : arrays) {
    const void* chunk = chunk_of(array.get());
    if (std::find(seen.begin(), seen.end(), chunk) != seen.end()) continue;
    seen.push_back(chunk);
    kept.push_back(array.get());
  }
  return kept;
}

}  // namespace polyhvd::mxnet
