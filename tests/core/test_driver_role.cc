// Who drives an engine, and what it is tuned to: both without an engine.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "engine/driver_role.h"
#include "engine/tuner.h"

using namespace polyhvd;

TEST_CASE("one thread drives at a time, and knows that it does") {
  DriverRole role;
  DriverRole other;
  CHECK_FALSE(role.is_mine());
  REQUIRE(role.take());
  CHECK(role.is_mine());
  CHECK_FALSE(other.is_mine());
  CHECK_FALSE(role.take());
  std::thread([&] {
    CHECK_FALSE(role.is_mine());
    CHECK_FALSE(role.take());
  }).join();
  role.release();
  CHECK_FALSE(role.is_mine());
  CHECK(role.take());
}

TEST_CASE("a role that was retired is nobody's, and stays taken") {
  DriverRole role;
  REQUIRE(role.take());
  role.retire();
  CHECK_FALSE(role.is_mine());
  CHECK_FALSE(role.take());
}

TEST_CASE("who waits for the role gets it when the driver leaves") {
  DriverRole role;
  REQUIRE(role.take());
  std::atomic<int> driven{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&] {
      while (!role.take()) role.await([] { return false; });
      ++driven;
      role.release();
    });
  }
  while (!role.is_awaited()) std::this_thread::yield();
  CHECK(driven == 0);
  role.release();
  for (std::thread& thread : threads) thread.join();
  CHECK(driven == 3);
  CHECK_FALSE(role.is_awaited());
}

TEST_CASE("who waits for the role leaves when its operation is done") {
  DriverRole role;
  REQUIRE(role.take());
  std::atomic<bool> done{false};
  std::thread waiter([&] {
    while (!done) role.await([&] { return done.load(); });
  });
  while (!role.is_awaited()) std::this_thread::yield();
  done = true;
  role.notify();
  waiter.join();
  CHECK_FALSE(role.take());  // still the first one's
}

TEST_CASE("a claim stays") {
  DriverRole role;
  CHECK_FALSE(role.is_claimed());
  role.claim();
  REQUIRE(role.take());
  role.release();
  CHECK(role.is_claimed());
}

TEST_CASE("lending that is in vain pauses, and is counted") {
  Lending lending;
  CHECK(lending.is_worth_it());
  lending.note(true, true);
  for (int i = 0; i < 20; ++i) lending.note(false, true);
  CHECK(lending.lent() == 1);
  CHECK(lending.in_vain() == 20);
  CHECK_FALSE(lending.is_worth_it());
}

TEST_CASE("lending beside other operations tells nothing of the next one") {
  Lending lending;
  for (int i = 0; i < 20; ++i) lending.note(false, false);
  CHECK(lending.is_worth_it());
}

TEST_CASE("a wish for other tuning is taken once, the last one") {
  Tuner tuner({.cycle_us = 7}, std::chrono::microseconds(7), 0, nullptr);
  CHECK_FALSE(tuner.has_wish());
  CHECK(!tuner.take_wish());
  tuner.want({.cycle_us = 8});
  tuner.want({.cycle_us = 9});
  CHECK(tuner.has_wish());
  CHECK(tuner.current().cycle_us == 7);
  CHECK(tuner.take_wish()->cycle_us == 9);
  CHECK_FALSE(tuner.has_wish());
  CHECK(!tuner.take_wish());
}

TEST_CASE("what is adopted is what this rank works with") {
  Tuner tuner({}, std::chrono::nanoseconds(1500), 0, nullptr);
  CHECK(tuner.cycle() == std::chrono::nanoseconds(1500));
  tuner.adopt({.fusion_bytes_max = 5, .cycle_us = 20});
  CHECK(tuner.current() == Tuning{.fusion_bytes_max = 5, .cycle_us = 20});
  CHECK(tuner.cycle() == std::chrono::microseconds(20));
  CHECK_FALSE(tuner.measures());
}
