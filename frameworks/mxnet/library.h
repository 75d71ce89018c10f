// MXNet's functions as they were found in the process, and references to its arrays.
#pragma once

#include <cstddef>
#include <iterator>
#include <stdexcept>
#include <utility>

#include "control/types.h"
#include "mxnet_c_api.h"

namespace polyhvd::mxnet {

struct Library {
#define POLYHVD_POINTER(name, result, arguments) result(*name) arguments = nullptr;
  POLYHVD_MXNET_FUNCTIONS(POLYHVD_POINTER)
#undef POLYHVD_POINTER
  void (*reorder_async)(NDArrayHandle) = nullptr;         // null: not a oneDNN build
  bool (*in_onednn_layout)(const void* chunk) = nullptr;  // likewise
  void (*reorder)(void* chunk) = nullptr;                 // likewise
};
inline Library g_mx;  // set once by polyhvd_mxnet_load, before anything else is called

// A failed C call of MXNet.
inline void check(int status) {
  if (status != 0) throw std::runtime_error(g_mx.MXGetLastError());
}

// mshadow's type codes, by position.
inline int dtype_of(NDArrayHandle array) {
  constexpr DType kTable[] = {DType::kFloat32, DType::kFloat64, DType::kFloat16,
                              DType::kUint8,   DType::kInt32,   DType::kInt8,
                              DType::kInt64,   DType::kBool,    DType::kInt16};
  constexpr int kMxBfloat16 = 12;
  int code = -1;
  check(g_mx.MXNDArrayGetDType(array, &code));
  if (code == kMxBfloat16) return static_cast<int>(DType::kBfloat16);
  return code >= 0 && code < static_cast<int>(std::size(kTable)) ? static_cast<int>(kTable[code])
                                                                 : -1;
}

inline std::size_t item_bytes(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64:
      return 8;
    case DType::kFloat32:
    case DType::kInt32:
      return 4;
    case DType::kFloat16:
    case DType::kBfloat16:
    case DType::kInt16:
      return 2;
    default:
      return 1;
  }
}

// A reference of our own to an array, so that it outlives the caller's.
class Array {
 public:
  explicit Array(NDArrayHandle other) { check(g_mx.MXShallowCopyNDArray(other, &handle_)); }
  // Takes ownership of a handle.
  static Array owned(NDArrayHandle handle) noexcept {
    Array array;
    array.handle_ = handle;
    return array;
  }
  Array(Array&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() {
    if (handle_ != nullptr) g_mx.MXNDArrayFree(handle_);
  }
  NDArrayHandle get() const noexcept { return handle_; }

 private:
  Array() = default;

  NDArrayHandle handle_ = nullptr;
};

}  // namespace polyhvd::mxnet
