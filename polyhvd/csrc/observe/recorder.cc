#include "observe/recorder.h"

#include <algorithm>

namespace polyhvd {
namespace {

constexpr auto kRelaxed = std::memory_order_relaxed;
constexpr auto kAcquire = std::memory_order_acquire;
constexpr auto kRelease = std::memory_order_release;

// A time in the ring: 56 bits of ticks since the recorder was made, more than half a
// year at 4 GHz, below 8 bits of the lap.
constexpr int kTickBits = 56;
constexpr std::uint64_t kTickMask = (std::uint64_t{1} << kTickBits) - 1;
// Slots of operations in flight that a new one passes over before it takes one.
constexpr int kPassed = 16;
constexpr std::string_view kCut = "...";

std::uint64_t bytes_of(const Submission& s) {
  std::uint64_t bytes = 0;
  for (const TensorView& t : s.inputs) {
    bytes += static_cast<std::uint64_t>(element_count(t.shape)) * item_size(t.dtype);
  }
  return bytes;
}

}  // namespace

RecordedName::RecordedName(std::string_view name) noexcept {
  if (name.size() <= kBytes) {
    std::memcpy(text_.data(), name.data(), name.size());
    return;
  }
  std::size_t from = name.size() - (kBytes - kCut.size());
  while (from < name.size() && (name[from] & 0xc0) == 0x80) ++from;  // within a character
  std::memcpy(text_.data(), kCut.data(), kCut.size());
  std::memcpy(text_.data() + kCut.size(), name.data() + from, name.size() - from);
}

std::string_view name_of(OpState state) noexcept {
  constexpr std::string_view kNames[] = {"submitted", "announced", "agreed", "running",
                                         "done",      "failed",    "refused"};
  return kNames[static_cast<std::size_t>(state)];
}

Recorder::Recorder(std::size_t capacity)
    : capacity_(capacity), slots_(std::make_unique<Slot[]>(capacity)) {}

// Writing ---------------------------------------------------------------------

// The next slot, but for those of operations in flight: one that is stuck is what a
// reader will look for.
Recorder::Slot& Recorder::claim() noexcept {
  for (int i = 0; i < kPassed; ++i, ++next_) {
    Slot& slot = slots_[next_ % capacity_];
    const std::uint64_t held = slot.version.load(kRelaxed) / 2;
    if (held == 0 || time_of(slot, held, kAtEnd) != 0) return slot;
  }
  return slots_[next_ % capacity_];
}

void Recorder::on_submit(Operation& operation) noexcept {
  const Submission& s = operation.submission;
  Slot& slot = claim();
  const std::uint64_t sequence = next_++;
  operation.sequence = sequence;
  slot.version.store(sequence * 2 + 1, kRelaxed);
  const DType dtype = s.inputs.empty() ? DType::kUint8 : s.inputs[0].dtype;
  slot.what.store(std::uint64_t{s.process_set} << 32 | static_cast<std::uint64_t>(s.kind) << 8 |
                      static_cast<std::uint64_t>(dtype),
                  kRelease);
  slot.bytes.store(bytes_of(s), kRelease);
  const RecordedName::Words name = RecordedName(s.name).words();
  for (std::size_t i = 0; i < name.size(); ++i) slot.name[i].store(name[i], kRelease);
  for (Word& time : slot.times) time.store(0, kRelease);
  stamp(slot, sequence, kAtSubmit, ticks_now());
  slot.version.store(sequence * 2, kRelease);
}

Recorder::Slot* Recorder::slot_of(const Operation& operation) noexcept {
  Slot& slot = slots_[operation.sequence % capacity_];
  return slot.version.load(kRelaxed) == operation.sequence * 2 ? &slot : nullptr;
}

void Recorder::stamp(Slot& slot, std::uint64_t sequence, Moment moment, Ticks now) noexcept {
  const std::uint64_t age = std::max<Ticks>(now - born_.ticks, 1) & kTickMask;
  slot.times[moment].store(lap_of(sequence) << kTickBits | age, kRelease);
}

void Recorder::on_announce(const Operation& operation, Ticks now) noexcept {
  if (Slot* slot = slot_of(operation)) stamp(*slot, operation.sequence, kAtAnnounce, now);
}

void Recorder::on_agreement(const Operation& operation, std::uint64_t batch, CacheId id,
                            std::size_t fused, Ticks now) noexcept {
  Slot* slot = slot_of(operation);
  if (slot == nullptr) return;
  slot->batch.store(batch, kRelease);
  slot->place.store(std::uint64_t{id} << 32 | static_cast<std::uint32_t>(fused), kRelease);
  stamp(*slot, operation.sequence, kAtAgreement, now);
}

void Recorder::on_start(const Operation& operation, Ticks now) noexcept {
  if (Slot* slot = slot_of(operation)) stamp(*slot, operation.sequence, kAtStart, now);
}

void Recorder::on_end(const Operation& operation, OpState state) noexcept {
  Slot* slot = slot_of(operation);
  if (slot == nullptr) return;
  slot->end.store(static_cast<std::uint64_t>(state), kRelease);
  stamp(*slot, operation.sequence, kAtEnd, ticks_now());
}

// Reading ---------------------------------------------------------------------

Ticks Recorder::time_of(const Slot& slot, std::uint64_t sequence, Moment moment) const noexcept {
  const std::uint64_t word = slot.times[moment].load(kAcquire);
  const std::uint64_t tag = lap_of(sequence) << kTickBits >> kTickBits;
  if (word == 0 || word >> kTickBits != tag) return 0;
  return born_.ticks + (word & kTickMask);
}

bool Recorder::read(const Slot& slot, Record& record) const {
  const std::uint64_t version = slot.version.load(kAcquire);
  if (version == 0 || version % 2 != 0) return false;
  record.sequence = version / 2;
  const std::uint64_t what = slot.what.load(kAcquire);
  record.process_set = static_cast<ProcessSetId>(what >> 32);
  record.kind = static_cast<OpKind>(what >> 8 & 0xff);
  record.dtype = static_cast<DType>(what & 0xff);
  record.bytes = slot.bytes.load(kAcquire);
  RecordedName::Words name;
  for (std::size_t i = 0; i < name.size(); ++i) name[i] = slot.name[i].load(kAcquire);
  // The end first: what an operation went through earlier is complete then.
  for (std::size_t i = kMoments; i-- > 0;) {
    record.times[i] = time_of(slot, record.sequence, static_cast<Moment>(i));
  }
  const bool agreed = record.times[kAtAgreement] != 0;
  const std::uint64_t place = slot.place.load(kAcquire);
  record.batch = agreed ? slot.batch.load(kAcquire) : 0;
  record.cache_id = agreed ? static_cast<CacheId>(place >> 32) : 0;
  record.fused = agreed ? static_cast<std::uint32_t>(place) : 0;
  record.state = OpState::kSubmitted;
  for (std::size_t i = kAtAnnounce; i <= kAtStart; ++i) {
    if (record.times[i] != 0) record.state = static_cast<OpState>(i);
  }
  if (record.times[kAtEnd] != 0) record.state = static_cast<OpState>(slot.end.load(kAcquire));
  if (slot.version.load(kAcquire) != version) return false;
  record.name = RecordedName(name);
  return true;
}

std::vector<Record> Recorder::snapshot() const {
  std::vector<Record> records;
  records.reserve(capacity_);
  Record record;
  for (std::size_t i = 0; i < capacity_; ++i) {
    if (read(slots_[i], record)) records.push_back(record);
  }
  std::ranges::sort(records, {}, &Record::sequence);
  return records;
}

bool Recorder::read(const Operation& operation, Record& record) const {
  return read(slots_[operation.sequence % capacity_], record) &&
         record.sequence == operation.sequence;
}

std::uint64_t Recorder::waiting_since(Ticks before) const noexcept {
  std::uint64_t found = 0;
  for (std::size_t i = 0; i < capacity_; ++i) {
    const std::uint64_t sequence = slots_[i].version.load(kAcquire) / 2;
    const Ticks announced = sequence == 0 ? 0 : time_of(slots_[i], sequence, kAtAnnounce);
    if (announced == 0 || announced >= before) continue;
    if (time_of(slots_[i], sequence, kAtAgreement) != 0) continue;
    if (time_of(slots_[i], sequence, kAtEnd) != 0) continue;
    before = announced;
    found = sequence;
  }
  return found;
}

}  // namespace polyhvd
