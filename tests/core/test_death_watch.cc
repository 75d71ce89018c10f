// Real processes that end in every way there is: which of them is a death, and who hears of it.
#include <doctest/doctest.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "shm/death_watch.h"
#include "thread_world.h"

using namespace polyhvd;
using namespace polyhvd::test;
using shm::DeathWatch;

namespace {

bool eventually(const std::function<bool()>& holds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// A host whose rank 0 is this process; the others are children of it.
class Host {
 public:
  explicit Host(int size) : size_(size), fd_(memfd_create("polyhvd-test", MFD_CLOEXEC)) {
    REQUIRE(fd_ >= 0);
    REQUIRE(ftruncate(fd_, static_cast<off_t>(shm::Segment::bytes(size))) == 0);
    segment_ = std::make_unique<shm::Segment>(fd_, size);
  }
  ~Host() {
    for (const pid_t child : children_) kill(child, SIGKILL);
    for (const pid_t child : children_) waitpid(child, nullptr, 0);
    close(fd_);
  }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  shm::Segment& segment() { return *segment_; }

  // Runs `body` in a child that is rank `local`. No thread may run in this process.
  pid_t start(int local, const std::function<void(shm::Segment&)>& body) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
      shm::Segment segment(fd_, size_);
      {
        const DeathWatch watch(segment, local, [] {});
        body(segment);
      }
      pause_for_ever();
    }
    children_.push_back(child);
    REQUIRE(eventually([&] { return segment().life(local).load() != 0; }));
    return child;
  }

  [[noreturn]] static void pause_for_ever() {
    while (true) pause();
  }

 private:
  int size_;
  int fd_;
  std::unique_ptr<shm::Segment> segment_;
  std::vector<pid_t> children_;
};

void live(shm::Segment&) { Host::pause_for_ever(); }

// A word as the kernel leaves it.
void mark_dead(shm::Segment& segment, int local) {
  segment.life(local).store(FUTEX_WAITERS | FUTEX_OWNER_DIED);
  syscall(SYS_futex, &segment.life(local), FUTEX_WAKE, 1, nullptr, nullptr, 0);
}

}  // namespace

TEST_CASE("a process that ends without leave is dead, however it ends") {
  const std::vector<std::function<void(shm::Segment&)>> ends{
      live,  // and is killed
      [](shm::Segment&) { _exit(0); },
      [](shm::Segment&) { execl("/bin/sleep", "sleep", "60", nullptr); },
      [](shm::Segment&) {
        const rlimit no_core{0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        std::signal(SIGSEGV, SIG_DFL);
        raise(SIGSEGV);
      },
  };
  for (std::size_t i = 0; i < ends.size(); ++i) {
    CAPTURE(i);
    Host host(3);
    host.start(1, live);
    const pid_t child = host.start(2, [&](shm::Segment& segment) {
      // Not before the others look.
      if (i > 0) eventually([&] { return segment.removals(0).load() == 1; });
      ends[i](segment);
    });
    std::atomic<int> calls{0};
    DeathWatch watch(host.segment(), 0, [&] { ++calls; });
    CHECK(watch.found() == -1);
    CHECK(watch.dead().empty());
    host.segment().removals(0).store(1);
    if (i == 0) kill(child, SIGKILL);
    // Rank 1 alone watches rank 2: all can see it, and a rank that has notifies rank 0.
    CHECK(eventually([&] { return watch.dead() == std::vector<int>{2}; }));
    CHECK(calls == 0);
  }
}

TEST_CASE("the rank before a dead one in the ring is notified once") {
  Host host(3);
  const pid_t next = host.start(1, live);
  const pid_t last = host.start(2, live);
  std::atomic<int> calls{0};
  DeathWatch watch(host.segment(), 0, [&] { ++calls; });
  kill(next, SIGKILL);
  CHECK(eventually([&] { return calls == 1; }));
  CHECK(watch.found() == 1);
  kill(last, SIGKILL);
  CHECK(eventually([&] { return watch.dead() == std::vector<int>{1, 2}; }));
  CHECK(calls == 1);
  CHECK(watch.found() == 1);
}

TEST_CASE("a process that leaves is not dead, and the one behind it is watched then") {
  Host host(3);
  const pid_t first = host.start(1, [](shm::Segment& segment) {
    eventually([&] { return segment.removals(0).load() == 1; });
  });
  const pid_t second = host.start(2, live);
  std::atomic<int> calls{0};
  DeathWatch watch(host.segment(), 0, [&] { ++calls; });
  host.segment().removals(0).store(1);
  CHECK(eventually([&] { return host.segment().life(1).load() == FUTEX_WAITERS; }));
  kill(first, SIGKILL);
  waitpid(first, nullptr, 0);
  CHECK(watch.dead().empty());
  CHECK(calls == 0);
  kill(second, SIGKILL);
  CHECK(eventually([&] { return calls == 1; }));
  CHECK(watch.found() == 2);
}

TEST_CASE("a process that has departed may end as it likes") {
  Host host(2);
  const pid_t child = host.start(1, live);
  std::atomic<int> calls{0};
  {
    const DeathWatch watch(host.segment(), 0, [&] { ++calls; });
    host.segment().departed_flag(1).store(1);
    kill(child, SIGKILL);
    REQUIRE(waitpid(child, nullptr, 0) == child);
    CHECK((host.segment().life(1).load() & FUTEX_OWNER_DIED) != 0);
    CHECK(watch.dead().empty());
  }
  CHECK(calls == 0);
}

TEST_CASE("a process that is stopped, and the end of its threads and children, is no death") {
  Host host(2);
  const pid_t child = host.start(1, [](shm::Segment& segment) {
    std::thread([] {}).join();
    const pid_t grandchild = fork();
    if (grandchild == 0) _exit(0);
    waitpid(grandchild, nullptr, 0);
    const pid_t program = vfork();
    if (program == 0) {
      execl("/bin/true", "true", nullptr);
      _exit(1);
    }
    waitpid(program, nullptr, 0);
    segment.removals(1).store(1);
    Host::pause_for_ever();
  });
  DeathWatch watch(host.segment(), 0, [] {});
  CHECK(eventually([&] { return host.segment().removals(1).load() == 1; }));
  kill(child, SIGSTOP);
  int status = 0;
  REQUIRE(waitpid(child, &status, WUNTRACED) == child);
  REQUIRE(WIFSTOPPED(status));
  CHECK(watch.dead().empty());
  kill(child, SIGCONT);
  REQUIRE(waitpid(child, &status, WCONTINUED) == child);
  CHECK(watch.dead().empty());
  kill(child, SIGKILL);
  CHECK(eventually([&] { return watch.found() == 1; }));
}

TEST_CASE(
    "where the kernel refuses the list the word stays free, and others are watched all the same") {
  Host host(2);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    // Rank 0 is this one: it may not hold a word, and hears of rank 1, its parent, all the same.
    sock_filter refuse[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_set_robust_list, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{std::size(refuse), refuse};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) _exit(2);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) _exit(3);
    Host twin(2);
    std::atomic<int> calls{0};
    {
      DeathWatch watch(twin.segment(), 0, [&] { ++calls; });
      mark_dead(twin.segment(), 1);
      if (!eventually([&] { return calls == 1; })) _exit(4);
      if (twin.segment().life(0).load() != 0) _exit(5);
    }
    _exit(0);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}

TEST_CASE("watches come and go without a death") {
  for (int round = 0; round < 50; ++round) {
    Host host(3);
    std::atomic<int> calls{0};
    std::vector<std::thread> ranks;
    for (int local = 0; local < 3; ++local) {
      ranks.emplace_back([&, local] { DeathWatch watch(host.segment(), local, [&] { ++calls; }); });
    }
    for (std::thread& rank : ranks) rank.join();
    REQUIRE(calls == 0);
    for (int local = 0; local < 3; ++local) {
      REQUIRE(host.segment().life(local).load() == FUTEX_WAITERS);
    }
  }
}

TEST_CASE("a death ends all waits though no connection has closed, and names the rank") {
  for (const Layout& layout : {one_host(2), one_host(4), Layout{{0, 1, 3}, {2}}}) {
    ThreadWorld world(layout);
    const int victim = world.size() > 3 ? 3 : 1;
    std::atomic<int> met{0};
    std::atomic<int> lost{0};
    world.run([&](int rank, Engine& engine) {
      std::vector<float> v(10);
      engine.wait(engine.submit(allreduce("before", v)));
      ++met;
      // Its own part is done before that of the others may be, which its death would fail.
      while (rank == victim && met < world.size()) std::this_thread::yield();
      if (rank == victim) return world.mark_dead(victim);
      try {
        engine.wait(engine.submit(allreduce("after", v)));
      } catch (const Failure& failure) {
        lost += failure.error().code == ErrorCode::kPeerLost &&
                failure.error().message.find("rank " + std::to_string(victim) +
                                             " (a thread) was lost to rank ") != std::string::npos;
      }
    });
    CHECK(lost == world.size() - 1);
    CHECK(world.engine(0).dead_here() == std::vector<int>{victim});
    world.engine(0).shutdown();
    CHECK(world.engine(0).dead_here() == std::vector<int>{victim});
    world.shutdown();
  }
}

TEST_CASE("where nobody watches, ranks hold no word") {
  ThreadWorld world(one_host(2), {}, {}, [](Connections& c) { c.watches_deaths = false; });
  world.run([&](int rank, Engine& engine) {
    std::vector<float> v(10, static_cast<float>(rank));
    engine.wait(engine.submit(allreduce("sum", v)));
    CHECK(v[0] == 1);
    CHECK(engine.dead_here().empty());
  });
  CHECK(world.life(0) == 0);
  CHECK(world.life(1) == 0);
  world.shutdown();
}

TEST_CASE("a death is known to who has nothing pending") {
  ThreadWorld world(one_host(3));
  world.mark_dead(2);
  for (const int rank : {0, 1}) {
    std::vector<float> v(10);
    CHECK(eventually([&] {
      try {
        auto operation = world.engine(rank).submit(allreduce("x", v));
        world.engine(rank).wait(operation);
      } catch (const Failure& failure) {
        return failure.error().code == ErrorCode::kPeerLost;
      }
      return false;
    }));
  }
  world.shutdown();
}

TEST_CASE("ranks that have left do not hide a death from the others") {
  ThreadWorld world(one_host(4), {{0, 3}});
  world.run([&](int, Engine& engine) {
    std::vector<float> v(10);
    engine.wait(engine.submit(allreduce("before", v)));
  });
  world.engine(1).shutdown();
  world.engine(2).shutdown();
  std::vector<std::thread> ranks;
  std::atomic<int> done{0};
  for (const int rank : {0, 3}) {
    ranks.emplace_back([&, rank] {
      std::vector<float> v(10);
      Engine& engine = world.engine(rank);
      engine.wait(engine.submit(allreduce("pair", v, ReduceOp::kSum, 1)));
      ++done;
    });
  }
  for (std::thread& rank : ranks) rank.join();
  CHECK(done == 2);
  world.mark_dead(3);
  std::vector<float> v(10);
  CHECK_THROWS_AS(
      world.engine(0).wait(world.engine(0).submit(allreduce("x", v, ReduceOp::kSum, 1))), Failure);
  CHECK(world.engine(0).dead_here() == std::vector<int>{3});
  world.shutdown();
}
