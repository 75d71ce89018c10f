#include "observe/lock_order.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <span>

namespace polyhvd {
namespace {

constexpr std::array kNames = {
#define POLYHVD_LOCK(name) #name,
    POLYHVD_LOCK_ORDER(POLYHVD_LOCK)
#undef POLYHVD_LOCK
};

struct Held {
  const CheckedMutex* mutex;
  LockRank rank;
};

// What the current thread holds, in the order in which it was taken. Plain data: threads end, and
// statics are destroyed, while locks are still used.
constinit thread_local std::array<Held, kNames.size()> t_held{};
constinit thread_local std::size_t t_count = 0;

std::span<Held> held() noexcept { return {t_held.data(), t_count}; }

[[noreturn]] void fail(const char* what, LockRank rank, const char* while_held) noexcept {
  std::fprintf(stderr, "polyhvd: lock order: a thread %s '%s' while it holds %s%s%s; %s\n", what,
               name_of(rank), while_held == nullptr ? "no such lock" : "'",
               while_held == nullptr ? "" : while_held, while_held == nullptr ? "" : "'",
               "the order is in observe/lock_order.h");
  std::abort();
}

void add(const CheckedMutex* mutex, LockRank rank) noexcept {
  if (t_count == t_held.size()) fail("takes one lock too many,", rank, "as many as there are");
  t_held[t_count++] = {mutex, rank};
}

void refuse_again(const CheckedMutex* mutex, LockRank rank) noexcept {
  if (std::ranges::find(held(), mutex, &Held::mutex) != held().end()) {
    fail("takes", rank, name_of(rank));
  }
}

}  // namespace

const char* name_of(LockRank rank) noexcept { return kNames[static_cast<std::size_t>(rank)]; }

void CheckedMutex::lock() {
  for (const Held& other : held()) {
    if (other.rank >= rank_) fail("takes", rank_, name_of(other.rank));
  }
  mutex_.lock();
  add(this, rank_);
}

bool CheckedMutex::try_lock() {
  refuse_again(this, rank_);
  if (!mutex_.try_lock()) return false;
  add(this, rank_);
  return true;
}

void CheckedMutex::unlock() {
  const auto own = std::ranges::find(held(), this, &Held::mutex);
  if (own == held().end()) fail("releases", rank_, nullptr);
  std::move(own + 1, held().end(), own);
  --t_count;
  mutex_.unlock();
}

void require_no_checked_lock(const char* what) noexcept {
  if (t_count == 0) return;
  std::fprintf(stderr,
               "polyhvd: lock order: a thread waits for %s while it holds '%s'; the order is in "
               "observe/lock_order.h\n",
               what, name_of(t_held[t_count - 1].rank));
  std::abort();
}

}  // namespace polyhvd
