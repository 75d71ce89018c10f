// How long a rank waits for others: when a wait begins and ends.
#include <doctest/doctest.h>

#include "observe/wait_meter.h"

namespace polyhvd {
namespace {

TEST_CASE("a wait begins with the first operation that is announced and ends with the last") {
  WaitMeter meter;
  meter.on_announce(1, 100);
  meter.on_announce(2, 150);
  meter.on_agreement(160);
  meter.on_agreement(170);
  CHECK(meter.waited() == 0);
  meter.on_agreement(300);
  CHECK(meter.waited() == 200);
  CHECK(meter.agreed() == 3);
}

TEST_CASE("time without an announced operation is no wait") {
  WaitMeter meter;
  meter.on_announce(1, 100);
  meter.on_agreement(110);
  meter.on_announce(0, 500);
  meter.on_announce(1, 1000);
  meter.on_agreement(1005);
  CHECK(meter.waited() == 15);
}

}  // namespace
}  // namespace polyhvd
