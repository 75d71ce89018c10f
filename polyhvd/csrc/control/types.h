// The vocabulary of the core: element types, operations and views of tensors.
// Owns no memory and knows no framework, transport or backend.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace polyhvd {

// Values are part of the wire format and of c_api.h: append, never renumber.
enum class DType : std::uint8_t {
  kUint8 = 0,
  kInt8 = 1,
  kInt16 = 2,
  kInt32 = 3,
  kInt64 = 4,
  kFloat16 = 5,
  kBfloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBool = 9,
  kUint16 = 10,
  kUint32 = 11,
  kUint64 = 12,
};
inline constexpr int kDTypeCount = 13;

enum class OpKind : std::uint8_t {
  kAllreduce = 0,
  kAllgather = 1,
  kBroadcast = 2,
  kBarrier = 3,
  kAlltoall = 4,
  kReducescatter = 5,
  kJoin = 6,
  kAddProcessSet = 7,
  kRemoveProcessSet = 8,
};
inline constexpr int kOpKindCount = 9;

// Horovod's numbers. kAverage never reaches a backend: the queue turns it into
// kSum with a postscale of 1 / size.
enum class ReduceOp : std::uint8_t {
  kAverage = 0,
  kSum = 1,
  kAdasum = 2,
  kMin = 3,
  kMax = 4,
  kProduct = 5,
};

enum class DeviceKind : std::uint8_t { kCpu = 0, kCuda = 1 };

struct Device {
  DeviceKind kind = DeviceKind::kCpu;
  int index = 0;
  friend bool operator==(const Device&, const Device&) = default;
};

using Shape = std::vector<std::int64_t>;

// Factors applied to each term before the sum and to the sum. In double for
// integers (the result is truncated), in float for half types, else native.
struct Scale {
  double pre = 1.0;
  double post = 1.0;
  friend bool operator==(const Scale&, const Scale&) = default;
};

// A view of a dense row-major tensor, without ownership.
struct TensorView {
  void* data = nullptr;
  Shape shape;
  DType dtype = DType::kFloat32;
  Device device;
};

// A run of elements of one fused operation, where they lie.
struct Segment {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};
using Segments = std::span<const Segment>;

using ProcessSetId = std::uint32_t;
inline constexpr ProcessSetId kWorld = 0;

// Which of the calls without a name of its kind and process set a call is, counted from 1
// on each rank: calls of equal turns belong together. 0: the call has a name.
using Turn = std::uint64_t;

// Whether operations of a kind carry tensors; the others only synchronise.
constexpr bool has_tensors(OpKind kind) noexcept {
  return kind < OpKind::kBarrier || kind == OpKind::kAlltoall || kind == OpKind::kReducescatter;
}
// Whether a reduction and scale factors belong to it.
constexpr bool reduces(OpKind kind) noexcept {
  return kind == OpKind::kAllreduce || kind == OpKind::kReducescatter;
}
// Whether the first dimension of a tensor is each rank's own affair.
constexpr bool has_own_rows(OpKind kind) noexcept {
  return kind == OpKind::kAllgather || kind == OpKind::kAlltoall;
}

// Whether it changes the members of process sets. The coordinator negotiates each one again.
constexpr bool changes_membership(OpKind kind) noexcept { return kind >= OpKind::kJoin; }

std::size_t item_size(DType dtype) noexcept;
std::string_view name_of(DType dtype) noexcept;
std::string_view name_of(OpKind kind) noexcept;
std::string_view name_of(ReduceOp op) noexcept;

// "allreduce.noname.16": what people are shown for turn 17.
class TurnName {
 public:
  TurnName(OpKind kind, Turn turn) noexcept;
  std::string_view view() const noexcept { return {text_, size_}; }
  std::string text() const { return std::string(view()); }

 private:
  char text_[48];
  std::size_t size_;
};

// Product of the dimensions; 1 for a scalar. Callers have checked the bound.
std::int64_t element_count(std::span<const std::int64_t> shape) noexcept;

// Rows of a reducescatter that member `position` of `size` keeps: the first ones
// keep one more when `rows` does not divide.
constexpr std::int64_t rows_kept(std::int64_t rows, int position, int size) noexcept {
  return rows / size + (position < rows % size ? 1 : 0);
}

}  // namespace polyhvd
