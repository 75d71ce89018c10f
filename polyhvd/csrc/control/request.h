// A rank's wish (Request), what all ranks agreed on (Agreement), and what the
// coordinator decides next (Decision). Plain values; wire.h encodes them.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "control/error.h"
#include "control/types.h"

namespace polyhvd {

// Number of an agreement in every rank's response cache. Given out by the
// coordinator, never reused.
using CacheId = std::uint32_t;

// One named operation as one rank asks for it. Several tensors may form one
// request: they become ready, run and fail together.
struct Request {
  std::int32_t rank = 0;
  ProcessSetId process_set = kWorld;
  OpKind kind = OpKind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kFloat32;  // of the first tensor
  std::vector<DType> dtypes;      // of each tensor, when they differ
  DeviceKind device = DeviceKind::kCpu;
  // Broadcast: a world rank. remove_process_set: the set's number.
  std::int32_t root = -1;
  std::int32_t priority = 0;
  Scale scale;
  std::vector<Shape> shapes;  // add_process_set: one of one number for each rank
  std::string name;
  std::string where;  // "train.py:88" of the caller, for error messages
  Turn turn = 0;      // not 0: the name is TurnName(kind, turn)
};

// What a call without a name is found by.
struct TurnKey {
  ProcessSetId process_set = kWorld;
  OpKind kind = OpKind::kAllreduce;
  Turn turn = 0;
  friend auto operator<=>(const TurnKey&, const TurnKey&) = default;
};
struct TurnKeyHash {
  std::size_t operator()(const TurnKey& key) const noexcept {
    const auto line = std::uint64_t{key.process_set} << 8 | static_cast<std::uint8_t>(key.kind);
    return static_cast<std::size_t>(key.turn ^ line * 0x9e3779b97f4a7c15u);
  }
};

// Whether they are equal except for the rank.
inline bool asks_alike(const Request& a, const Request& b) {
  return a.name == b.name && a.process_set == b.process_set && a.kind == b.kind && a.op == b.op &&
         a.dtype == b.dtype && a.dtypes == b.dtypes && a.device == b.device && a.root == b.root &&
         a.priority == b.priority && a.scale == b.scale && a.shapes == b.shapes &&
         a.where == b.where && a.turn == b.turn;
}

// How often the operation of a name has been agreed on, as far as a replica has seen. Says
// nothing of what is agreed.
struct RunCount {
  mutable std::uint64_t count = 0;  // the driver's
  bool is_exact = true;             // false: the name was forgotten once
  friend bool operator==(const RunCount&, const RunCount&) noexcept { return true; }
};

// What every member of the process set will run. For allgather, shapes[i][0]
// is the sum of the ranks' rows, and rows[m * shapes.size() + i] those of
// member m (by position in the process set) of tensor i. For alltoall it is 0:
// the rows go with the data. The root of a join is the rank that joined last.
// Without a name it is a template: what calls without a name that ask for this agree on,
// whatever their turns.
struct Agreement {
  ProcessSetId process_set = kWorld;
  OpKind kind = OpKind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;
  DType dtype = DType::kFloat32;
  std::vector<DType> dtypes;
  DeviceKind device = DeviceKind::kCpu;
  std::int32_t root = -1;
  std::int32_t priority = 0;
  Scale scale;
  std::vector<Shape> shapes;
  std::vector<std::int64_t> rows;
  std::string name;
  RunCount runs{};  // of this replica: it does not travel
  friend bool operator==(const Agreement&, const Agreement&) = default;
};

// Element type of tensor `i` of a request or an agreement.
template <class Operation>
DType dtype_of(const Operation& operation, std::size_t i) noexcept {
  return operation.dtypes.empty() ? operation.dtype : operation.dtypes[i];
}

// What satisfies() asks of a request, and of a submission.
inline std::size_t tensor_count(const Request& r) noexcept { return r.shapes.size(); }
inline const Shape& shape_of(const Request& r, std::size_t i) noexcept { return r.shapes[i]; }
inline DeviceKind device_kind_of(const Request& r) noexcept { return r.device; }

inline std::size_t tensor_count(const Agreement& a) noexcept { return a.shapes.size(); }
inline const Shape& shape_of(const Agreement& a, std::size_t i) noexcept { return a.shapes[i]; }

struct Definition {
  CacheId id = 0;
  Agreement agreement;
};

// Operations that run as one: several of one kind, see fusion.h, or a single entry.
struct Batch {
  std::vector<CacheId> ids;
  std::vector<Turn> turns{};  // of those that have one, 0 for others; empty: none has
  Turn turn(std::size_t i) const noexcept { return turns.empty() ? 0 : turns[i]; }
};

// A rank that leaves in good order. If its program has failed, its last words:
// "has failed: ValueError: bad row (train.py, line 31)".
struct Departure {
  std::int32_t rank = 0;
  std::string words{};
  friend bool operator==(const Departure&, const Departure&) = default;
};
inline constexpr std::size_t kLastWordsBytesMax = 512;

// A named operation that failed on all members of its process set.
struct Refusal {
  ProcessSetId process_set = kWorld;
  std::string name;
  Error error;
  OpKind kind = OpKind::kAllreduce;  // of a call without a name, and which it is
  Turn turn = 0;
  Departure cause{};  // of a kPeerDeparted: the rank whose program has failed; without words: none
};

// A rank must send its request in full: it named an id that was evicted. It answers
// each, also when nothing is left to send.
struct Resend {
  std::int32_t rank = 0;
  CacheId id = 0;
  Turn turn = 0;
};

// One step of the total order, the same on every rank. Applied in the order of
// the fields: definitions, resends, refusals, batches, evictions.
struct Decision {
  std::vector<Definition> definitions;
  std::vector<Resend> resends;
  std::vector<Refusal> refusals;
  std::vector<Batch> batches;
  std::vector<CacheId> evictions;
  bool empty() const noexcept {
    return definitions.empty() && resends.empty() && refusals.empty() && batches.empty() &&
           evictions.empty();
  }
};

// What a rank, or a whole subtree of ranks, reports towards the coordinator.
struct Report {
  // Every member of the id's process set below the sender is ready for it.
  std::vector<CacheId> subtree_hits{};
  // One rank is ready for an id: sent where a subtree is not complete.
  struct Hit {
    std::int32_t rank = 0;
    CacheId id = 0;
  };
  std::vector<Hit> hits{};
  // Likewise for calls without a name: the id of a template, and the turn.
  struct TurnHit {
    std::int32_t rank = 0;  // of a subtree: 0
    CacheId id = 0;
    Turn turn = 0;
  };
  std::vector<TurnHit> subtree_turns{};
  std::vector<TurnHit> turns{};
  // Every member of the set below the sender asks for this; of one of them.
  std::vector<Request> subtree_requests{};
  std::vector<Request> requests{};
  std::vector<Departure> departures{};
  std::vector<Resend> answers{};  // whose requests, if any, came before
  bool empty() const noexcept {
    return subtree_hits.empty() && hits.empty() && subtree_turns.empty() && turns.empty() &&
           subtree_requests.empty() && requests.empty() && departures.empty() && answers.empty();
  }
};

}  // namespace polyhvd
