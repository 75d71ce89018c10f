// The slot that a native adapter keeps the engine's table in.
#include <doctest/doctest.h>

#include <thread>

#include "api/engine_slot.h"

using namespace polyhvd;

namespace {

const polyhvd_engine_api kTable{
    POLYHVD_C_API_VERSION, sizeof(polyhvd_engine_api), 1, nullptr, nullptr, nullptr};

}  // namespace

TEST_CASE("an engine leaves its slot when all visits are over, nested ones too") {
  EngineSlot slot;
  REQUIRE(slot.set(&kTable));
  std::atomic<bool> leaving{false};
  std::atomic<bool> left{false};
  std::thread other;
  {
    const EngineSlot::Visit visit(slot);
    CHECK(visit.api() == &kTable);
    other = std::thread([&] {
      leaving = true;
      slot.set(nullptr);
      left = true;
    });
    while (!leaving) std::this_thread::yield();
    while (EngineSlot::Visit(slot).api() != nullptr) std::this_thread::yield();
    CHECK(!left);
  }
  other.join();
  CHECK(EngineSlot::Visit(slot).api() == nullptr);
}

TEST_CASE("a slot takes no table of another version") {
  EngineSlot slot;
  polyhvd_engine_api other = kTable;
  other.version = POLYHVD_C_API_VERSION + 1;
  CHECK(!slot.set(&other));
  CHECK(EngineSlot::Visit(slot).api() == nullptr);
}
