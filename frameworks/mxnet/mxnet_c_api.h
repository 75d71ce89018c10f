// The part of MXNet's C API that native.cc calls, written by hand so that no
// MXNet header is needed. Describes include/mxnet/c_api.h, engine.h, base.h and
// ndarray.h of MXNet 1.9.1; every function is looked up in the running process.
#pragma once

#include <cstdint>

namespace polyhvd::mxnet {

using NDArrayHandle = void*;

// mxnet::Context: device type (1 cpu, 2 gpu, 3 pinned, 5 shared) and number.
struct Context {
  std::int32_t dev_type;
  std::int32_t dev_id;
};
inline constexpr int kDevCpu = 1;
inline constexpr int kDevCpuPinned = 3;
inline constexpr int kDevCpuShared = 5;

// mxnet::FnProperty. Normal ones run on the workers that compute; prioritized ones on workers of
// their own, so that an operator that computes for long does not hold back communication; the
// others inside the push, if their arrays are ready, else on the workers that compute.
inline constexpr int kNormal = 0;
inline constexpr int kCpuPrioritized = 3;
inline constexpr int kAsync = 4;

// mxnet::NDArrayStorageType; an array without storage has -1.
inline constexpr int kDefaultStorage = 0;

// mxnet::engine::CallbackOnComplete: a value of three pointers. It may be copied
// and called later, once, on any thread. `error` is a const dmlc::Error*, which
// is a std::runtime_error without further members.
struct OnComplete {
  void (*callback)(void* engine, void* param, const void* error);
  void* engine;
  void* param;
};

// EngineAsyncFunc; on_complete points to an OnComplete that dies on return.
using AsyncFunction = void (*)(void* run_context, void* on_complete, void* param);
using Deleter = void (*)(void* param);

// All return 0, or -1 with the reason in MXGetLastError().
#define POLYHVD_MXNET_FUNCTIONS(X)                                                                 \
  X(MXEnginePushAsyncND, int,                                                                      \
    (AsyncFunction, void* param, Deleter, const Context*, NDArrayHandle* reads, int read_count,    \
     NDArrayHandle* writes, int write_count, const int* property, int priority, const char* label, \
     bool wait))                                                                                   \
  X(MXEnginePushAsync, int,                                                                        \
    (AsyncFunction, void* param, Deleter, const Context*, void* read_variables, int read_count,    \
     void* written_variables, int write_count, const int* property, int priority,                  \
     const char* label, bool wait))                                                                \
  X(MXNDArrayCreateEx64, int,                                                                      \
    (const std::int64_t* shape, int ndim, int dev_type, int dev_id, int delay_alloc, int dtype,    \
     NDArrayHandle* made))                                                                         \
  X(MXShallowCopyNDArray, int, (NDArrayHandle, NDArrayHandle * copy))                              \
  X(MXNDArrayFree, int, (NDArrayHandle))                                                           \
  X(MXNDArrayGetData, int, (NDArrayHandle, void** data))                                           \
  X(MXNDArrayGetShapeEx64, int, (NDArrayHandle, int* ndim, const std::int64_t** shape))            \
  X(MXNDArrayGetDType, int, (NDArrayHandle, int* dtype))                                           \
  X(MXNDArrayGetContext, int, (NDArrayHandle, int* dev_type, int* dev_id))                         \
  X(MXNDArrayGetStorageType, int, (NDArrayHandle, int* storage_type))                              \
  X(MXGetLastError, const char*, ())

// Of builds with oneDNN, whose operators leave arrays in oneDNN's layouts.
// void mxnet::NDArray::Reorder2DefaultAsync() const
inline constexpr char kReorderAsync[] = "_ZNK5mxnet7NDArray20Reorder2DefaultAsyncEv";
// bool mxnet::NDArray::Chunk::IsMKLDNN() const
inline constexpr char kInOnednnLayout[] = "_ZNK5mxnet7NDArray5Chunk8IsMKLDNNEv";
// void mxnet::NDArray::Chunk::Reorder2Default(), by whoever may write the array now
inline constexpr char kReorder[] = "_ZN5mxnet7NDArray5Chunk15Reorder2DefaultEv";

// An NDArray begins with a std::shared_ptr<Chunk>: the memory that views share,
// and what the engine orders operations by.
inline void* chunk_of(NDArrayHandle array) { return *static_cast<void* const*>(array); }

}  // namespace polyhvd::mxnet
