// The last few thousand operations of this rank, each with its state and times: a
// fixed ring that can be read at any time from any thread, also when the engine is
// stuck. What the timeline and the flight recorder show comes from here.
//
// Writing costs stores and a reading of the clock; nothing is allocated or locked.
#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>
#include <vector>

#include "control/operation.h"
#include "control/types.h"
#include "observe/ticks.h"

namespace polyhvd {

enum class OpState : std::uint8_t {
  kSubmitted = 0,
  kAnnounced = 1,  // sent to the other ranks
  kAgreed = 2,     // all members have submitted it: it waits for its turn
  kRunning = 3,
  kDone = 4,
  kFailed = 5,   // with the engine
  kRefused = 6,  // by all members: they disagree, or one has left
};
std::string_view name_of(OpState state) noexcept;

// Moments of an operation; its last one is the end, however it ended.
enum Moment : std::size_t { kAtSubmit, kAtAnnounce, kAtAgreement, kAtStart, kAtEnd, kMoments };

// A name of at most 64 bytes, in place, so that records are copied without allocating.
// Of a longer one its end, which identifies it, after "...".
class RecordedName {
 public:
  static constexpr std::size_t kBytes = 64;
  using Words = std::array<std::uint64_t, kBytes / sizeof(std::uint64_t)>;  // padded with zeros

  RecordedName() = default;
  explicit RecordedName(std::string_view name) noexcept;
  explicit RecordedName(const Words& words) noexcept : text_(std::bit_cast<Text>(words)) {}

  Words words() const noexcept { return std::bit_cast<Words>(text_); }
  std::string_view view() const noexcept {
    return {text_.data(), strnlen(text_.data(), text_.size())};
  }

 private:
  using Text = std::array<char, kBytes>;
  Text text_{};
};

// A copy of what the ring holds about one operation.
struct Record {
  std::uint64_t sequence = 0;  // ascends in order of submission, with gaps
  ProcessSetId process_set = kWorld;
  OpKind kind = OpKind::kAllreduce;
  DType dtype = DType::kFloat32;
  std::uint64_t bytes = 0;  // of this rank's inputs
  RecordedName name;
  OpState state = OpState::kSubmitted;
  std::uint64_t batch = 0;  // from 1, in the total order, equal on all ranks; 0: none yet
  CacheId cache_id = 0;     // with a batch
  std::uint32_t fused = 0;  // operations in the batch
  std::array<Ticks, kMoments> times{};  // zero: not reached
};

class Recorder {
 public:
  // `capacity` operations are remembered, and those in flight somewhat longer.
  explicit Recorder(std::size_t capacity = 4096);

  // One thread at a time: the caller holds the queue's lock. Numbers the operation.
  void on_submit(Operation& operation) noexcept;
  // The driver's. They do nothing for an operation that was overwritten meanwhile.
  void on_announce(const Operation& operation, Ticks now) noexcept;
  void on_agreement(const Operation& operation, std::uint64_t batch, CacheId id, std::size_t fused,
                    Ticks now) noexcept;
  void on_start(const Operation& operation, Ticks now) noexcept;
  void on_end(const Operation& operation, OpState state) noexcept;

  // Any thread. Oldest first; what is being overwritten right now is left out.
  std::vector<Record> snapshot() const;
  // Any thread. False when the operation was overwritten.
  bool read(const Operation& operation, Record& record) const;
  // Sequence of the operation that has waited longest for other ranks, if it has
  // waited since `before`; 0 otherwise. Any thread.
  std::uint64_t waiting_since(Ticks before) const noexcept;

  // For the times of records that were read by now.
  TickScale scale() const noexcept { return TickScale(born_); }

 private:
  using Word = std::atomic<std::uint64_t>;

  // A sequence lock: `version` is odd while on_submit writes, else twice the number
  // of the operation. The words that on_submit writes are stored with release and
  // read with acquire: a reader that sees one of a newer operation then also sees
  // the newer version, and drops what it has read. No fence is needed, which
  // ThreadSanitizer would not understand.
  //
  // Each later word is one store by the driver, and needs no lock. `times` carry the
  // low bits of the lap: a store that comes too late, when the slot has another
  // operation already, is recognized by its tag. `batch`, `place` and `end` are stored
  // before the time that makes them valid.
  struct alignas(64) Slot {
    Word version{0};
    Word what{0};  // process set, kind, dtype
    Word bytes{0};
    std::array<Word, std::tuple_size_v<RecordedName::Words>> name{};
    Word batch{0};  // valid with kAtAgreement
    Word place{0};  // cache id, operations in the batch; likewise
    Word end{0};    // OpState; valid with kAtEnd
    std::array<Word, kMoments> times{};
  };

  Slot& claim() noexcept;
  Slot* slot_of(const Operation& operation) noexcept;
  void stamp(Slot& slot, std::uint64_t sequence, Moment moment, Ticks now) noexcept;
  Ticks time_of(const Slot& slot, std::uint64_t sequence, Moment moment) const noexcept;
  bool read(const Slot& slot, Record& record) const;
  std::uint64_t lap_of(std::uint64_t sequence) const noexcept { return sequence / capacity_; }

  const TickAnchor born_;
  const std::size_t capacity_;
  const std::unique_ptr<Slot[]> slots_;
  std::uint64_t next_ = 1;  // guarded by the queue's lock
};

}  // namespace polyhvd
