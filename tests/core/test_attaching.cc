// Who may write into whose memory, and other processes' memory by cross memory attach.
#include <doctest/doctest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <numeric>
#include <thread>
#include <vector>

#include "host/attached/peer_memory.h"
#include "host/staged/local_group.h"

namespace polyhvd::host {
namespace {

// Two members' views of one staging area, as if they were two processes.
struct Pair {
  std::vector<shm::Counter> counters{static_cast<std::size_t>(2 * (4 + shm::kSlots))};
  Resources resources;
  LocalGroup first = member(0);
  LocalGroup second = member(1);

  LocalGroup member(int self) {
    resources.domains = {{0, 1}};
    resources.domain_of = {0, 0};
    shm::Staging staging;
    staging.begun = counters.data();
    staging.reduced = staging.begun + 2;
    staging.writing = staging.reduced + 2;
    staging.closed = staging.writing + 2;
    staging.notes = staging.closed + 2;
    staging.size = 2;
    return LocalGroup(resources, staging, Place{}, {0, 1}, self);
  }
};

bool nobody_is_gone(int) { return false; }

constexpr std::uint64_t kStep = 7;

TEST_CASE("a member's memory is written to until it closes it, and in later steps again") {
  Pair pair;
  int writes = 0;
  pair.second.write_into(0, kStep, [&] { ++writes; });
  CHECK(writes == 1);
  pair.first.close(kStep, nobody_is_gone);
  pair.second.write_into(0, kStep, [&] { ++writes; });
  CHECK(writes == 1);
  pair.second.write_into(0, kStep + 1, [&] { ++writes; });
  CHECK(writes == 2);
  pair.first.write_into(1, kStep, [&] { ++writes; });  // that one is open
  CHECK(writes == 3);
}

TEST_CASE("nothing is written after close() has returned, whenever it was called") {
  for (int round = 0; round < 200; ++round) {
    Pair pair;
    std::atomic<bool> closed{false};
    std::atomic<bool> stop{false};
    std::atomic<int> late{0};
    std::thread writer([&] {
      while (!stop) pair.second.write_into(0, kStep, [&] { late += closed.load(); });
    });
    for (int i = 0; i < round % 20; ++i) std::this_thread::yield();
    pair.first.close(kStep, nobody_is_gone);
    closed = true;
    std::this_thread::yield();
    stop = true;
    writer.join();
    CHECK(late == 0);
  }
}

TEST_CASE("who has died while writing is not waited for, and who is suspended not for ever") {
  Pair pair;
  pair.counters[5].value = 1;  // writing[1]
  pair.first.close(kStep, [](int member) { return member == 1; });
  pair.first.close(kStep, nobody_is_gone);
}

TEST_CASE("thousands of pieces are read from another process, and written to it") {
  constexpr std::size_t kPieces = 3000;
  constexpr std::size_t kApart = 3;
  using Values = std::uint16_t[kPieces * kApart];
  auto* values = static_cast<std::uint16_t*>(
      mmap(nullptr, sizeof(Values), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  REQUIRE(values != MAP_FAILED);
  std::iota(values, values + kPieces * kApart, std::uint16_t{0});
  int done[2];
  REQUIRE(pipe(done) == 0);
  const pid_t other = fork();
  if (other == 0) {
    char byte;
    close(done[1]);
    (void)!read(done[0], &byte, 1);  // until the parent has closed its end
    bool right = true;
    for (std::size_t i = 0; i < kPieces * kApart; ++i) {
      const auto expected = static_cast<std::uint16_t>(i % kApart == 0 ? i + 1 : i);
      right = right && values[i] == expected;
    }
    _exit(right ? 0 : 1);
  }
  close(done[0]);
  std::vector<iovec> theirs;
  for (std::size_t i = 0; i < kPieces; ++i) theirs.push_back({&values[i * kApart], 2});
  std::vector<std::uint16_t> found(kPieces);
  CHECK(read_memory(other, theirs, reinterpret_cast<std::byte*>(found.data())) == 0);
  std::vector<iovec> mine;
  for (std::size_t i = 0; i < kPieces; ++i) {
    CHECK(found[i] == i * kApart);
    ++found[i];
    mine.push_back({&found[i], 2});
  }
  CHECK(write_memory(other, mine, theirs) == 0);
  CHECK(values[0] == 0);  // ours is not its
  close(done[1]);
  int status = 1;
  waitpid(other, &status, 0);
  CHECK(status == 0);
  CHECK(read_memory(other, theirs, reinterpret_cast<std::byte*>(found.data())) == ESRCH);
  munmap(values, sizeof(Values));
}

TEST_CASE("memory is within reach if it can be read, whichever of many it is") {
  std::vector<std::byte> values(1000);
  std::vector<Segment> segments;
  for (std::byte& value : values) segments.push_back({&value, 1});
  CHECK(is_within_reach(segments));
  void* nothing = mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(nothing != MAP_FAILED);
  segments.push_back({static_cast<std::byte*>(nothing), 0});
  CHECK(is_within_reach(segments));
  segments.insert(segments.begin() + 500, {static_cast<std::byte*>(nothing), 1});
  CHECK(!is_within_reach(segments));
  munmap(nothing, 4096);
}

}  // namespace
}  // namespace polyhvd::host
