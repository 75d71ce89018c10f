// The parts of DLPack that we use, declared by hand after the specification
// (https://dmlc.github.io/dlpack/latest/c_api.html, versions 0.8 and 1.2).
#pragma once

#include <cstdint>

// Values of DLDevice::device_type.
inline constexpr std::int32_t kDlpackCpu = 1;
inline constexpr std::int32_t kDlpackCuda = 2;

extern "C" {

struct DLDevice {
  std::int32_t device_type;
  std::int32_t device_id;
};

struct DLDataType {
  std::uint8_t code;  // 0 int, 1 uint, 2 float, 4 bfloat, 6 bool
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null means dense and row-major
  std::uint64_t byte_offset;
};

struct DLManagedTensor {
  DLTensor dl_tensor;
  void* manager_ctx;
  void (*deleter)(DLManagedTensor* self);
};

struct DLPackVersion {
  std::uint32_t major;
  std::uint32_t minor;
};

struct DLManagedTensorVersioned;

struct DLPackExchangeAPIHeader {
  DLPackVersion version;
  DLPackExchangeAPIHeader* prev_api;
};

// What a tensor type offers as __dlpack_c_exchange_api__ (DLPack 1.2).
struct DLPackExchangeAPI {
  DLPackExchangeAPIHeader header;
  int (*managed_tensor_allocator)(DLTensor*, DLManagedTensorVersioned**, void*,
                                  void (*)(void*, const char*, const char*));
  int (*managed_tensor_from_py_object_no_sync)(void*, DLManagedTensorVersioned**);
  int (*managed_tensor_to_py_object_no_sync)(DLManagedTensorVersioned*, void**);
  int (*dltensor_from_py_object_no_sync)(void*, DLTensor*);  // non-owning; 0 or a Python error
  int (*current_work_stream)(std::int32_t, std::int32_t, void**);
};

}  // extern "C"
