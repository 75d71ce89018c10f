#include "shm/death_watch.h"

#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>

namespace polyhvd::shm {
namespace {

// What a word holds after its thread has let it go. Before, it is 0, then the thread's id. The bit
// for waiters is always set with an id, so that the kernel wakes threads that sleep on the word.
constexpr std::uint32_t kLetGo = FUTEX_WAITERS;

// A wake-up that has gone to a thread which ends at this moment is made up for after so long.
constexpr timespec kSleep{1, 0};
constexpr int kYields = 50;
constexpr auto kPause = std::chrono::microseconds(100);

void sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t value) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &kSleep, nullptr, 0);
}

void wake_all(std::atomic<std::uint32_t>& word) noexcept {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

DeathWatch::DeathWatch(Segment& segment, int self, std::function<void()> on_death)
    : segment_(segment), self_(self), on_death_(std::move(on_death)), watched_(self) {
  thread_ = std::thread([this] { run(); });
}

DeathWatch::~DeathWatch() {
  stop_.store(1);
  // It may be about to fall asleep, so that one wake-up could be too early.
  for (int i = 0; !over_.load(); ++i) {
    wake_all(stop_);
    wake_all(segment_.life(watched_.load()));
    if (i < kYields) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(kPause);
    }
  }
  thread_.join();
}

void DeathWatch::run() noexcept {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);  // the program's signals are for its own threads
  hold();
  watch();
  let_go();
  over_.store(true);
}

void DeathWatch::hold() noexcept {
  Word& word = segment_.life(self_);
  head_.list.next = &entry_;
  head_.futex_offset = reinterpret_cast<char*>(&word) - reinterpret_cast<char*>(&entry_);
  entry_.next = &head_.list;
  if (syscall(SYS_set_robust_list, &head_, sizeof head_) != 0) return;
  word.store(static_cast<std::uint32_t>(syscall(SYS_gettid)) | FUTEX_WAITERS);
  wake_all(word);
}

void DeathWatch::let_go() noexcept {
  Word& word = segment_.life(self_);
  word.store(kLetGo);
  wake_all(word);
  head_.list.next = &head_.list;
}

void DeathWatch::watch() noexcept {
  int local = self_;
  const auto advance = [&] { local = (local + 1) % segment_.local_size(); };
  for (advance(); stop_.load() == 0;) {
    if (local == self_ || found_.load() >= 0) {  // there is no rank to watch any more
      sleep_on(stop_, 0);
      continue;
    }
    Word& word = segment_.life(local);
    const std::uint32_t value = word.load();
    if (is_dead(local)) {
      found_.store(local, std::memory_order_release);
      on_death_();
    } else if (value == kLetGo || (value & FUTEX_OWNER_DIED) != 0) {
      advance();
    } else {
      watched_.store(local);
      if (stop_.load() == 0) sleep_on(word, value);
    }
  }
  // The kernel wakes one sleeper, which may have been this one.
  if (local != self_) wake_all(segment_.life(local));
}

bool DeathWatch::is_dead(int local) const noexcept {
  return (segment_.life(local).load() & FUTEX_OWNER_DIED) != 0 &&
         segment_.departed_flag(local).load() == 0;
}

std::vector<int> DeathWatch::dead() const {
  std::vector<int> found;
  for (int local = 0; local < segment_.local_size(); ++local) {
    if (local != self_ && is_dead(local)) found.push_back(local);
  }
  return found;
}

}  // namespace polyhvd::shm
