// Reports a dead process of this host before its sockets close: the kernel first marks the locks
// that its threads have held, then frees its memory, which takes a while, and then closes its
// files.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include "shm/segment.h"

namespace polyhvd::shm {

// Each rank holds a word of the segment as a robust futex (set_robust_list(2)), which no thread
// ever waits to take. A thread of this object holds it, for the kernel's list of such words is one
// thread's: it marks them when that thread ends, whether the process was killed, has crashed, has
// called _exit() or has executed another program. The thread does nothing else that could lock
// anything, so that the C library's own list for it stays empty and is not missed. A stopped
// process keeps its word, and a forked one has none.
//
// While it holds its word, the thread sleeps on that of one other rank: the next one in a ring that
// has not released its own word. If ranks die, the one before a dead rank lives, or no rank is left
// to notify; and a world ends with its first death. So it is one thread for a rank and one wake-up
// for a death, whatever the number of ranks, and nothing on the way of an operation.
//
// Where the kernel refuses the list, the word stays free, and a death is known by its sockets. So
// it is without this object, in jobs that end with their first death: the launcher is to see the
// cause end before those that it makes fail.
class DeathWatch {
 public:
  // `on_death` runs on the watch's thread, once at most, after found() has changed.
  DeathWatch(Segment& segment, int self, std::function<void()> on_death);
  // Releases the word, so that the end of the thread is not taken for a death.
  ~DeathWatch();
  DeathWatch(const DeathWatch&) = delete;
  DeathWatch& operator=(const DeathWatch&) = delete;

  // The position of a rank that has died without having departed; -1: none is known. Any thread.
  int found() const noexcept { return found_.load(std::memory_order_acquire); }
  // All ranks that are known to have died, in ascending order. Any thread.
  std::vector<int> dead() const;

 private:
  using Word = std::atomic<std::uint32_t>;

  void run() noexcept;
  void hold() noexcept;
  void let_go() noexcept;
  void watch() noexcept;
  bool is_dead(int local) const noexcept;

  Segment& segment_;
  const int self_;
  const std::function<void()> on_death_;
  robust_list_head head_{};  // the kernel reads both until the thread is gone
  robust_list entry_{};
  Word stop_{0};              // 1: the thread is to end
  std::atomic<int> watched_;  // on whose word it sleeps
  std::atomic<int> found_{-1};
  std::atomic<bool> over_{false};  // it sleeps no more
  std::thread thread_;
};

}  // namespace polyhvd::shm
