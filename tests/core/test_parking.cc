// How a thread waits: what its sleep flag says when it goes to sleep.
#include <doctest/doctest.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine/parking.h"

namespace polyhvd {
namespace {

TEST_CASE("nobody goes to sleep whom others do not ring") {
  Parking parking;
  parking.set_crowded(true);
  parking.set_on_slow([] {});
  const int always_ready = eventfd(1, EFD_CLOEXEC);
  int sleeps = 0;
  parking.watch(always_ready, POLLIN, [&](short) { ++sleeps; });
  int last_looks = 0;
  parking.await(
      [&] {
        if (parking.sleep_flag().load() != Parking::kWaiting) return false;
        // As a wait within this one does when it is over.
        if (++last_looks == 1) parking.sleep_flag().store(Parking::kAwake);
        return last_looks == 2;
      },
      Parking::kForever);
  CHECK(sleeps == 0);
  parking.unwatch_all();
  close(always_ready);
}

}  // namespace
}  // namespace polyhvd
