// Litmus tests of every pair of threads or processes that each write a word and then read the
// other's. At least one must see the other's write, or a wake-up is lost. They can fail on x86-64,
// which reorders a store with a later load. docs/internals/memory-order.md has all atomics.
#include <doctest/doctest.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "api/engine_slot.h"
#include "control/operation.h"
#include "engine/driver_role.h"
#include "engine/parking.h"
#include "host/staged/local_group.h"
#include "shm/shm_channel.h"

using namespace polyhvd;

namespace {

constexpr int kRounds = 2'000;

// Runs both at the same moment, as nearly as two threads can, then `after`; for all rounds.
void race(const std::function<void()>& one, const std::function<void()>& other,
          const std::function<void()>& after) {
  std::atomic<int> begun{0};
  std::atomic<int> ended{0};
  const auto await = [](std::atomic<int>& word, int round) {
    for (int i = 1; word.load() < round; ++i) {
      if (i % 20000 == 0) sched_yield();
    }
  };
  std::thread second([&] {
    for (int round = 1; round <= kRounds; ++round) {
      await(begun, round);
      other();
      ended.store(round);
    }
  });
  for (int round = 1; round <= kRounds; ++round) {
    begun.store(round);
    for (int i = 0; i < round % 32; ++i) std::atomic_signal_fence(std::memory_order_seq_cst);
    one();
    await(ended, round);
    after();
  }
  second.join();
}

// Two ranks of a host in one process.
class Host {
 public:
  Host() : fd_(memfd_create("polyhvd-test", MFD_CLOEXEC)) {
    REQUIRE(fd_ >= 0);
    REQUIRE(ftruncate(fd_, static_cast<off_t>(shm::Segment::bytes(2))) == 0);
    segment_ = std::make_unique<shm::Segment>(fd_, 2);
    REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, bells_) == 0);
    for (int local = 0; local < 2; ++local) {
      parking_[local].set_sleep_flag(&segment_->sleep_flag(local));
      std::vector<shm::LocalPeer> peers(2);
      for (int i = 0; i < 2; ++i) peers[static_cast<std::size_t>(i)] = {i, i, -1};
      peers[static_cast<std::size_t>(1 - local)].fd = bells_[local];
      peers_[local] =
          std::make_unique<shm::LocalPeers>(*segment_, parking_[local], peers, local, [](int) {});
    }
  }
  ~Host() { close(fd_); }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  shm::Segment& segment() { return *segment_; }
  Parking& parking(int local) { return parking_[local]; }
  shm::LocalPeers& peers(int local) { return *peers_[local]; }
  // Whether the rank was woken, since the last call.
  bool was_woken(int local) {
    char bells[16];
    return recv(bells_[local], bells, sizeof bells, MSG_DONTWAIT) > 0;
  }

 private:
  int fd_;
  int bells_[2];
  std::unique_ptr<shm::Segment> segment_;
  Parking parking_[2];
  std::unique_ptr<shm::LocalPeers> peers_[2];
};

}  // namespace

TEST_CASE("a rank that goes to sleep sees the message, or is woken") {
  Host host;
  shm::Ring& ring = host.segment().ring_to_leader(1);
  shm::Ring& back = host.segment().ring_from_leader(1);
  shm::ShmChannel writer(ring, back, host.peers(1), 0, 0);
  shm::ShmChannel reader(back, ring, host.peers(0), 1, 1);
  std::string payload;
  bool seen = false;
  int lost = 0;
  race(
      [&] {
        host.parking(0).let_wake(Parking::kWaiting);
        seen = reader.poll(payload);
      },
      [&] { writer.post("x"); },
      [&] {
        lost += !host.was_woken(0) && !seen;
        if (!seen) REQUIRE(reader.poll(payload));
        host.parking(0).stay_awake();
      });
  CHECK(lost == 0);
}

TEST_CASE("a rank that waits for room in a ring sees it, or is woken") {
  Host host;
  shm::Ring& ring = host.segment().ring_to_leader(1);
  shm::Ring& back = host.segment().ring_from_leader(1);
  shm::ShmChannel writer(ring, back, host.peers(1), 0, 0);
  shm::ShmChannel reader(back, ring, host.peers(0), 1, 1);
  const std::string large(shm::kRingBytes, 'x');  // its frame does not fit
  std::string payload;
  int lost = 0;
  bool sent = false;
  writer.post(large);
  race(
      [&] {
        host.parking(1).let_wake(Parking::kWaiting);
        sent = writer.flush();
      },
      [&] { reader.poll(payload); },
      [&] {
        lost += !host.was_woken(1) && !sent;
        if (!sent) REQUIRE(writer.flush());
        payload.clear();
        while (payload.empty()) reader.poll(payload);
        host.parking(1).stay_awake();
        host.was_woken(1);
        writer.post(large);
      });
  CHECK(lost == 0);
}

TEST_CASE("a rank that waits for a step sees it, or is woken") {
  Host host;
  host::Resources resources;
  resources.domains = {{0, 1}};
  resources.domain_of = {0, 0};
  resources.segment = &host.segment();
  resources.peers = &host.peers(1);
  resources.rank = 1;
  resources.parking = &host.parking(1);
  const shm::Staging staging = host.segment().staging(0, 2);
  host::LocalGroup group(resources, staging, Place{}, {0, 1}, 1);
  std::uint64_t step = 0;
  bool seen = false;
  int lost = 0;
  race(
      [&] {
        host.parking(0).let_wake(Parking::kWaiting);
        seen = staging.begun[1].value.load() > step;
      },
      [&] { group.publish_begun(step, 0); },
      [&] {
        lost += !host.was_woken(0) && !seen;
        host.parking(0).stay_awake();
        ++step;
      });
  CHECK(lost == 0);
}

TEST_CASE("no rank writes into memory that its owner has closed") {
  Host host;
  host::Resources resources;
  resources.domains = {{0, 1}};
  resources.domain_of = {0, 0};
  const shm::Staging staging = host.segment().staging(0, 2);
  host::LocalGroup owner(resources, staging, Place{}, {0, 1}, 0);
  host::LocalGroup other(resources, staging, Place{}, {0, 1}, 1);
  std::uint64_t step = 0;
  int memory = 0;
  int late = 0;
  race(
      [&] {
        owner.close(step, [](int) { return false; });
        memory = 1;  // the owner's again: ThreadSanitizer reports a write beside it
      },
      [&] { other.write_into(0, step, [&] { memory = 2; }); },
      [&] {
        late += memory != 1;
        ++step;
      });
  CHECK(late == 0);
}

TEST_CASE("a thread that waits for the driver sees that its operation is done, or is notified") {
  DriverRole role;
  REQUIRE(role.take());
  auto operation = std::make_unique<Operation>(Submission{});
  bool seen = false;
  bool notified = false;
  std::atomic<bool> looked{false};
  int lost = 0;
  race(
      [&] {
        bool first = true;
        while (first || !looked) {
          role.await([&] {
            if (std::exchange(first, false)) seen = operation->is_finished();
            return looked.load();
          });
        }
      },
      [&] {
        operation->finish();
        notified = role.is_awaited();
        looked = true;  // the waiter stays until then
        role.notify();
      },
      [&] {
        lost += !seen && !notified;
        looked = false;
        operation = std::make_unique<Operation>(Submission{});
      });
  CHECK(lost == 0);
}

TEST_CASE("a visit sees that the engine has left, or the engine waits for its end") {
  const polyhvd_engine_api table{
      POLYHVD_C_API_VERSION, sizeof(polyhvd_engine_api), 1, nullptr, nullptr, nullptr};
  EngineSlot slot;
  REQUIRE(slot.set(&table));
  int memory = 0;
  int late = 0;
  race(
      [&] {
        slot.set(nullptr);
        memory = 1;  // the engine's end
      },
      [&] {
        const EngineSlot::Visit visit(slot);
        if (visit.api() != nullptr) memory = 2;
      },
      [&] {
        late += memory != 1;
        slot.set(&table);
      });
  CHECK(late == 0);
}
