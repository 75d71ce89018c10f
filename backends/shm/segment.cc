#include "shm/segment.h"

#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "control/process_set.h"

namespace polyhvd::shm {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kReasonBytes = 64 << 10;  // a stall report; untouched pages cost nothing

enum AbortState : std::uint32_t { kHealthy = 0, kWriting = 1, kAborted = 2 };

struct Header {
  alignas(kCacheLine) std::atomic<std::uint32_t> abort_state;
  std::uint32_t abort_code;
  char abort_reason[kReasonBytes];
};

struct alignas(kCacheLine) RankWords {
  alignas(kCacheLine) std::atomic<std::uint32_t> sleep;
  alignas(kCacheLine) std::atomic<std::uint32_t> departed;
  alignas(kCacheLine) std::atomic<std::uint32_t> life;
  alignas(kCacheLine) std::atomic<std::uint64_t> removals;
};

constexpr std::size_t round_up(std::size_t n, std::size_t unit) {
  return (n + unit - 1) / unit * unit;
}

std::size_t words_offset() { return round_up(sizeof(Header), kPage); }
std::size_t rings_offset(int ranks) {
  return words_offset() + round_up(sizeof(RankWords) * static_cast<std::size_t>(ranks), kPage);
}
std::size_t staging_offset(int ranks) {
  return rings_offset(ranks) + round_up(2 * sizeof(Ring) * static_cast<std::size_t>(ranks), kPage);
}
std::size_t counters_bytes(int ranks) {
  constexpr std::size_t kOfARank = 4 + kSlots;
  return round_up(kOfARank * sizeof(Counter) * static_cast<std::size_t>(ranks), kPage);
}
// The most that a process set with any number of members here can need.
std::size_t staging_bytes(int ranks) {
  std::size_t most = 0;
  for (int size = 1; size <= ranks; ++size) {
    const auto n = static_cast<std::size_t>(size);
    most = std::max(most, n * n * kSlots * chunk_bytes(size));
  }
  return counters_bytes(ranks) + round_up(most, kPage);
}

}  // namespace

std::size_t chunk_bytes(int size) noexcept {
  const auto n = static_cast<std::size_t>(std::max(size, 1));
  const std::size_t fitting = kStagingBytesMax / (kSlots * n * n) / kCacheLine * kCacheLine;
  return std::clamp(fitting, kCacheLine, kChunkBytesMax);
}

std::size_t Segment::bytes(int local_size) noexcept {
  return staging_offset(local_size) + kProcessSetsMax * staging_bytes(local_size);
}

Segment::Segment(int fd, int local_size) : bytes_(bytes(local_size)), local_size_(local_size) {
  struct stat status{};
  if (fstat(fd, &status) != 0 || static_cast<std::size_t>(status.st_size) < bytes_) {
    throw Failure(ErrorCode::kInternal, "the shared segment is smaller than " +
                                            std::to_string(bytes_) + " bytes: versions differ");
  }
  void* mapped = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (mapped == MAP_FAILED) {
    throw Failure(ErrorCode::kInternal,
                  "cannot map " + std::to_string(bytes_ >> 20) +
                      " MiB of addresses for the memory that the ranks of this host share: " +
                      std::strerror(errno) + "; raise the limit of addresses (ulimit -v)");
  }
  base_ = static_cast<std::byte*>(mapped);
  madvise(base_, bytes_, MADV_DONTFORK);
}

Segment::~Segment() { munmap(base_, bytes_); }

std::atomic<std::uint32_t>& Segment::sleep_flag(int local) const noexcept {
  return reinterpret_cast<RankWords*>(base_ + words_offset())[local].sleep;
}

std::atomic<std::uint32_t>& Segment::departed_flag(int local) const noexcept {
  return reinterpret_cast<RankWords*>(base_ + words_offset())[local].departed;
}

std::atomic<std::uint32_t>& Segment::life(int local) const noexcept {
  return reinterpret_cast<RankWords*>(base_ + words_offset())[local].life;
}

std::atomic<std::uint64_t>& Segment::removals(int local) const noexcept {
  return reinterpret_cast<RankWords*>(base_ + words_offset())[local].removals;
}

void Segment::set_abort(const Error& error) noexcept {
  auto* header = reinterpret_cast<Header*>(base_);
  std::uint32_t expected = kHealthy;
  if (!header->abort_state.compare_exchange_strong(expected, kWriting)) return;
  header->abort_code = static_cast<std::uint32_t>(error.code);
  const std::size_t n = std::min(error.message.size(), kReasonBytes - 1);
  std::memcpy(header->abort_reason, error.message.data(), n);
  header->abort_reason[n] = '\0';
  header->abort_state.store(kAborted);
}

bool Segment::aborted() const noexcept {
  // Sequentially consistent: a rank looks at it after it has set its sleep flag.
  return reinterpret_cast<Header*>(base_)->abort_state.load() == kAborted;
}

std::optional<Error> Segment::abort_reason() const {
  if (!aborted()) return std::nullopt;
  const auto* header = reinterpret_cast<Header*>(base_);
  const std::size_t n = strnlen(header->abort_reason, kReasonBytes);
  return Error{static_cast<ErrorCode>(header->abort_code), std::string(header->abort_reason, n)};
}

Ring& Segment::ring_to_leader(int local) const noexcept {
  return reinterpret_cast<Ring*>(base_ + rings_offset(local_size_))[2 * local];
}

Ring& Segment::ring_from_leader(int local) const noexcept {
  return reinterpret_cast<Ring*>(base_ + rings_offset(local_size_))[2 * local + 1];
}

Staging Segment::staging(int index, int members_here) const noexcept {
  std::byte* area = base_ + staging_offset(local_size_) +
                    static_cast<std::size_t>(index) * staging_bytes(local_size_);
  Staging staging;
  staging.begun = reinterpret_cast<Counter*>(area);
  staging.reduced = staging.begun + local_size_;
  staging.writing = staging.reduced + local_size_;
  staging.closed = staging.writing + local_size_;
  staging.notes = staging.closed + local_size_;
  staging.base = area + counters_bytes(local_size_);
  staging.size = members_here;
  staging.chunk_bytes = chunk_bytes(members_here);
  return staging;
}

}  // namespace polyhvd::shm
