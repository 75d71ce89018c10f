// The part of TensorFlow's C API that we use, written down by hand so that no
// TensorFlow header is needed. Described in the public headers tensorflow/c/ops.h,
// kernels.h, tf_tensor.h and tf_status.h (and tf_datatype.h for the numbers).
// Functions are looked up in the running process; see TfApi::load().
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
struct TF_Status;
struct TF_Tensor;
struct TF_OpDefinitionBuilder;
struct TF_ShapeInferenceContext;
struct TF_ShapeHandle;
struct TF_KernelBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_AsyncOpKernelDoneCallback;
}

namespace polyhvd::tf {

enum Code : int {
  kOk = 0,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kAborted = 10,
};

enum DataType : int {
  kFloat = 1,
  kDouble = 2,
  kInt32 = 3,
  kUint8 = 4,
  kInt16 = 5,
  kInt8 = 6,
  kInt64 = 9,
  kBool = 10,
  kBfloat16 = 14,
  kUint16 = 17,
  kHalf = 19,
  kUint32 = 22,
  kUint64 = 23,
};

using CreateKernel = void* (*)(TF_OpKernelConstruction*);
using ComputeAsync = void (*)(void*, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
using Compute = void (*)(void*, TF_OpKernelContext*);
using DeleteKernel = void (*)(void*);
using InferShape = void (*)(TF_ShapeInferenceContext*, TF_Status*);
using Deallocate = void (*)(void* data, size_t bytes, void* argument);

// X(return type, name, parameters)
#define POLYHVD_TF_API(X)                                                                         \
  X(TF_Status*, TF_NewStatus, (void))                                                             \
  X(void, TF_DeleteStatus, (TF_Status*))                                                          \
  X(void, TF_SetStatus, (TF_Status*, int, const char*))                                           \
  X(int, TF_GetCode, (const TF_Status*))                                                          \
  X(const char*, TF_Message, (const TF_Status*))                                                  \
  X(TF_OpDefinitionBuilder*, TF_NewOpDefinitionBuilder, (const char*))                            \
  X(void, TF_RegisterOpDefinition, (TF_OpDefinitionBuilder*, TF_Status*))                         \
  X(void, TF_OpDefinitionBuilderAddAttr, (TF_OpDefinitionBuilder*, const char*))                  \
  X(void, TF_OpDefinitionBuilderAddInput, (TF_OpDefinitionBuilder*, const char*))                 \
  X(void, TF_OpDefinitionBuilderAddOutput, (TF_OpDefinitionBuilder*, const char*))                \
  X(void, TF_OpDefinitionBuilderSetIsStateful, (TF_OpDefinitionBuilder*, bool))                   \
  X(void, TF_OpDefinitionBuilderSetShapeInferenceFunction, (TF_OpDefinitionBuilder*, InferShape)) \
  X(int64_t, TF_ShapeInferenceContextNumInputs, (TF_ShapeInferenceContext*))                      \
  X(TF_ShapeHandle*, TF_NewShapeHandle, (void))                                                   \
  X(void, TF_DeleteShapeHandle, (TF_ShapeHandle*))                                                \
  X(void, TF_ShapeInferenceContextGetInput,                                                       \
    (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))                                \
  X(void, TF_ShapeInferenceContextSetOutput,                                                      \
    (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))                                \
  X(TF_ShapeHandle*, TF_ShapeInferenceContextScalar, (TF_ShapeInferenceContext*))                 \
  X(TF_ShapeHandle*, TF_ShapeInferenceContextVectorFromSize, (TF_ShapeInferenceContext*, size_t)) \
  X(int, TF_ShapeInferenceContextRankKnown, (TF_ShapeInferenceContext*, TF_ShapeHandle*))         \
  X(int64_t, TF_ShapeInferenceContextRank, (TF_ShapeInferenceContext*, TF_ShapeHandle*))          \
  X(void, TF_ShapeInferenceContextSubshape,                                                       \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, int64_t, TF_ShapeHandle*, TF_Status*))  \
  X(void, TF_ShapeInferenceContextConcatenateShapes,                                              \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*))   \
  X(void, TF_ShapeInferenceContextSetUnknownShape, (TF_ShapeInferenceContext*, TF_Status*))       \
  X(void, TF_ShapeInferenceContext_GetAttrType,                                                   \
    (TF_ShapeInferenceContext*, const char*, int*, TF_Status*))                                   \
  X(TF_KernelBuilder*, TF_NewKernelBuilder,                                                       \
    (const char*, const char*, CreateKernel, Compute, DeleteKernel))                              \
  X(TF_KernelBuilder*, TF_NewAsyncKernelBuilder,                                                  \
    (const char*, const char*, CreateKernel, ComputeAsync, DeleteKernel))                         \
  X(void, TF_RegisterKernelBuilder, (const char*, TF_KernelBuilder*, TF_Status*))                 \
  X(void, TF_RunAsyncOpKernelDoneCallback, (TF_AsyncOpKernelDoneCallback*))                       \
  X(int, TF_NumInputs, (TF_OpKernelContext*))                                                     \
  X(void, TF_GetInput, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                       \
  X(TF_Tensor*, TF_AllocateOutput,                                                                \
    (TF_OpKernelContext*, int, int, const int64_t*, int, size_t, TF_Status*))                     \
  X(TF_Tensor*, TF_ForwardInputOrAllocateOutput,                                                  \
    (TF_OpKernelContext*, const int*, int, int, const int64_t*, int, int*, TF_Status*))           \
  X(void, TF_SetOutput, (TF_OpKernelContext*, int, const TF_Tensor*, TF_Status*))                 \
  X(void, TF_OpKernelContext_Failure, (TF_OpKernelContext*, TF_Status*))                          \
  X(void, TF_OpKernelConstruction_Failure, (TF_OpKernelConstruction*, TF_Status*))                \
  X(void, TF_OpKernelConstruction_GetAttrInt64,                                                   \
    (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*))                                \
  X(void, TF_OpKernelConstruction_GetAttrSize,                                                    \
    (TF_OpKernelConstruction*, const char*, int32_t*, int32_t*, TF_Status*))                      \
  X(void, TF_OpKernelConstruction_GetAttrString,                                                  \
    (TF_OpKernelConstruction*, const char*, char*, size_t, TF_Status*))                           \
  X(int, TF_TensorType, (const TF_Tensor*))                                                       \
  X(int, TF_NumDims, (const TF_Tensor*))                                                          \
  X(int64_t, TF_Dim, (const TF_Tensor*, int))                                                     \
  X(size_t, TF_TensorByteSize, (const TF_Tensor*))                                                \
  X(void*, TF_TensorData, (const TF_Tensor*))                                                     \
  X(void, TF_DeleteTensor, (TF_Tensor*))                                                          \
  X(TF_Tensor*, TF_NewTensor, (int, const int64_t*, int, void*, size_t, Deallocate, void*))

// What TensorFlow passes as a TF_AsyncOpKernelDoneCallback: a std::function<void()> of libstdc++,
// with which it is built. A wheel has libc++ inside, whose functions are laid out differently.
struct Callback {
  static constexpr int kClone = 2, kDestroy = 3;

  void* stored[2];
  bool (*manage)(void** to, void* const* from, int operation);
  void (*invoke)(void* const* stored);
};

// The functions, and what the probe found out about the one contract that varies.
struct TfApi {
#define X(ret, name, parameters) ret(*name) parameters = nullptr;
  POLYHVD_TF_API(X)
#undef X

  // TensorFlow 2.22 and later: the `done` of an asynchronous kernel lies on the heap,
  // and to run it deletes it. 2.13 to 2.21: it is a local std::function of the caller.
  bool done_is_owned = false;

  // Null when all functions were found, else the name of a missing one.
  const char* load();
};

// The one table of this library: filled when it is loaded, constant from then on.
extern TfApi tf;

// A TF_Status for one use.
class Status {
 public:
  Status() : status_(tf.TF_NewStatus()) {}
  Status(int code, const char* message) : Status() { tf.TF_SetStatus(status_, code, message); }
  ~Status() { tf.TF_DeleteStatus(status_); }
  Status(const Status&) = delete;
  Status& operator=(const Status&) = delete;
  operator TF_Status*() const noexcept { return status_; }
  bool ok() const noexcept { return tf.TF_GetCode(status_) == kOk; }
  const char* message() const noexcept { return tf.TF_Message(status_); }

 private:
  TF_Status* status_;
};

}  // namespace polyhvd::tf
