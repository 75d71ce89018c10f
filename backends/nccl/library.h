// NCCL as it is found at run time. No header of NCCL is needed: what is called is declared here
// by hand, after nccl.h of 2.14 to 2.30. Any thread; one communicator is one thread's at a time.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>

#include "control/device.h"

namespace polyhvd::nccl {

// Communicators that are made without blocking came with it.
inline constexpr int kVersionMin = 21400;
// Several ranks on one GPU, where NCCL_MULTI_RANK_GPU_ENABLE allows it.
inline constexpr int kVersionOfSharedGpus = 23000;

enum class Result : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum class DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

// Operations that are created get other numbers.
enum class RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3 };
inline constexpr int kScalarHostImmediate = 1;

using Comm = struct ncclComm*;

struct UniqueId {
  std::array<char, 128> bytes;
};

// As of 2.14: later versions take what is missing for its default.
struct CommConfig {
  std::size_t size = sizeof(CommConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = kVersionMin;
  int blocking = 0;
  int unused = 0;
};

struct Functions {
  const char* (*GetErrorString)(Result);
  Result (*GetUniqueId)(UniqueId*);
  Result (*CommInitRankConfig)(Comm*, int, UniqueId, int, CommConfig*);
  Result (*CommGetAsyncError)(Comm, Result*);
  Result (*CommFinalize)(Comm);
  Result (*CommDestroy)(Comm);
  Result (*CommAbort)(Comm);
  Result (*GroupStart)();
  Result (*GroupEnd)();
  Result (*AllReduce)(const void*, void*, std::size_t, DataType, RedOp, Comm, Stream);
  Result (*ReduceScatter)(const void*, void*, std::size_t, DataType, RedOp, Comm, Stream);
  Result (*AllGather)(const void*, void*, std::size_t, DataType, Comm, Stream);
  Result (*Broadcast)(const void*, void*, std::size_t, DataType, int, Comm, Stream);
  Result (*Send)(const void*, std::size_t, DataType, int, Comm, Stream);
  Result (*Recv)(void*, std::size_t, DataType, int, Comm, Stream);
  Result (*RedOpCreatePreMulSum)(RedOp*, void*, DataType, int, Comm);
  Result (*RedOpDestroy)(RedOp, Comm);
  // Null where the version has none.
  const char* (*GetLastError)(Comm);
  Result (*MemAlloc)(void**, std::size_t);
  Result (*MemFree)(void*);
  Result (*CommRegister)(Comm, void*, std::size_t, void**);
  Result (*CommDeregister)(Comm, void*);
};

class Library {
 public:
  Library(const Functions& functions, std::string path, int version)
      : call(functions), path_(std::move(path)), version_(version) {}

  const Functions call;
  const std::string& path() const noexcept { return path_; }
  int version() const noexcept { return version_; }

  // NCCL's text for a result, and for the last error of a communicator.
  std::string words(Result result, Comm comm = nullptr) const;
  // Throws Failure unless the call has succeeded, or has begun.
  void check(const char* function, Result result, Comm comm = nullptr) const;

 private:
  std::string path_;
  int version_;
};

// "2.28.9" for 22809.
std::string version_text(int version);

// The library that is in the process already, or else the first of these that can be used:
// file names, or paths. It is never closed. Throws Failure(kInvalidArgument) with the reason for
// each when there is none.
std::shared_ptr<const Library> open_library(std::span<const std::string> names);

}  // namespace polyhvd::nccl
