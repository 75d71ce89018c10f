// The order of locks: in it nothing happens, out of it the process ends. Each offence is committed
// by a child, whose last words are read.
#include <doctest/doctest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>

#include "observe/lock_order.h"

using namespace polyhvd;

namespace {

struct End {
  bool aborted = false;
  std::string words;
};

End end_of(const std::function<void()>& offence) {
  std::array<int, 2> pipe_ends{};
  REQUIRE(pipe(pipe_ends.data()) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    std::signal(SIGABRT, SIG_DFL);  // the test program reports it itself
    dup2(pipe_ends[1], STDERR_FILENO);
    offence();
    _exit(0);
  }
  close(pipe_ends[1]);
  End end;
  std::array<char, 256> piece{};
  for (ssize_t n = 0; (n = read(pipe_ends[0], piece.data(), piece.size())) > 0;) {
    end.words.append(piece.data(), static_cast<std::size_t>(n));
  }
  close(pipe_ends[0]);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  end.aborted = WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
  return end;
}

// Whether it has ended the process, and named these two.
bool is_refused(const std::function<void()>& offence, const char* first, const char* second) {
  const End end = end_of(offence);
  INFO(end.words);
  CHECK(end.words.find(first) != std::string::npos);
  CHECK(end.words.find(second) != std::string::npos);
  return end.aborted;
}

}  // namespace

TEST_CASE("locks may be taken in their order, and let go of in any") {
  CheckedMutex outer(LockRank::shutdown);
  CheckedMutex middle(LockRank::queue);
  CheckedMutex inner(LockRank::watched);
  for (int i = 0; i < 3; ++i) {
    const std::lock_guard first(outer);
    std::unique_lock second(middle);
    const std::lock_guard third(inner);
    second.unlock();
    CHECK_FALSE(second.owns_lock());
  }
  const std::lock_guard again(middle);
}

TEST_CASE("a lock out of order ends the process, with both names") {
  CHECK(is_refused(
      [] {
        CheckedMutex outer(LockRank::mailbox);
        CheckedMutex inner(LockRank::queue);
        const std::lock_guard first(inner);
        const std::lock_guard second(outer);
      },
      "'mailbox'", "'queue'"));
}

TEST_CASE("a lock below the last one is not enough: it stands below all that are held") {
  CHECK(is_refused(
      [] {
        CheckedMutex queue(LockRank::queue);
        CheckedMutex shutdown(LockRank::shutdown);
        CheckedMutex tuning(LockRank::tuning);
        const std::lock_guard first(queue);
        REQUIRE(shutdown.try_lock());  // cannot wait, and so may
        const std::lock_guard second(tuning);
      },
      "'tuning'", "'queue'"));
}

TEST_CASE("two locks of one line have no order") {
  CHECK(is_refused(
      [] {
        CheckedMutex one(LockRank::queue);
        CheckedMutex other(LockRank::queue);
        const std::lock_guard first(one);
        const std::lock_guard second(other);
      },
      "takes 'queue'", "holds 'queue'"));
}

TEST_CASE("a lock that its thread holds is not taken again, nor tried") {
  for (const bool tries : {false, true}) {
    CHECK(is_refused(
        [tries] {
          CheckedMutex mutex(LockRank::turn);
          const std::lock_guard first(mutex);
          if (tries) {
            (void)mutex.try_lock();
          } else {
            mutex.lock();
          }
        },
        "takes 'turn'", "holds 'turn'"));
  }
}

TEST_CASE("a lock that its thread does not hold is not released") {
  CHECK(
      is_refused([] { CheckedMutex(LockRank::turn).unlock(); }, "releases 'turn'", "no such lock"));
}

TEST_CASE("a lock that could not be had by trying is not held") {
  CheckedMutex mutex(LockRank::queue);
  CheckedMutex outer(LockRank::mailbox);
  const std::lock_guard lock(mutex);
  std::thread([&] {
    CHECK_FALSE(mutex.try_lock());
    const std::lock_guard first(outer);
  }).join();
}

TEST_CASE("a wait for a condition lets go of its lock, and takes it back in order") {
  CheckedMutex mutex(LockRank::queue);
  CheckedMutex outer(LockRank::shutdown);
  std::condition_variable_any news;
  bool notified = false;
  std::thread other([&] {
    const std::lock_guard lock(mutex);
    notified = true;
    news.notify_all();
  });
  {
    const std::lock_guard first(outer);
    std::unique_lock lock(mutex);
    news.wait(lock, [&] { return notified; });
  }
  other.join();
  CHECK(is_refused(
      [] {
        CheckedMutex waits(LockRank::mailbox);
        CheckedMutex inner(LockRank::queue);
        std::condition_variable_any never;
        std::unique_lock lock(waits);
        const std::lock_guard second(inner);  // held by who sleeps
        never.wait_for(lock, std::chrono::milliseconds(1));
      },
      "'mailbox'", "'queue'"));
}

TEST_CASE("who holds a lock waits for nothing that stands above all") {
  require_no_checked_lock("Python's lock");
  CHECK(is_refused(
      [] {
        CheckedMutex mutex(LockRank::queue);
        const std::lock_guard lock(mutex);
        require_no_checked_lock("Python's lock");
      },
      "Python's lock", "'queue'"));
}

TEST_CASE("a build for release has plain mutexes, one for tests has checked ones") {
#ifdef POLYHVD_CHECK_LOCK_ORDER
  CHECK(std::is_base_of_v<CheckedMutex, OrderedMutex<LockRank::queue>>);
  CHECK(is_refused(
      [] {
        OrderedMutex<LockRank::turn> inner;
        OrderedMutex<LockRank::shutdown> outer;
        const std::lock_guard first(inner);
        const std::lock_guard second(outer);
      },
      "'shutdown'", "'turn'"));
#else
  CHECK(std::is_same_v<std::mutex, OrderedMutex<LockRank::queue>>);
  CHECK(std::is_same_v<std::condition_variable, OrderedCondition>);
#endif
}
