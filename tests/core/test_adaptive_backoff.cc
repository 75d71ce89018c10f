// When something that may work or not is attempted.
#include <doctest/doctest.h>

#include "engine/adaptive_backoff.h"

using namespace polyhvd;

namespace {

// AdaptiveBackoff among `occasions`, if each works or none does.
int made(AdaptiveBackoff& attempts, int occasions, bool work) {
  int count = 0;
  for (int i = 0; i < occasions; ++i) {
    if (!attempts.worth_it()) continue;
    attempts.note(work);
    ++count;
  }
  return count;
}

}  // namespace

TEST_CASE("what works is attempted at every occasion") {
  AdaptiveBackoff attempts;
  CHECK(made(attempts, 1000, true) == 1000);
}

TEST_CASE("what never works is attempted less and less") {
  AdaptiveBackoff attempts;
  CHECK(made(attempts, 10000, false) < 50);
  CHECK(made(attempts, 10000, false) <= 10000 / AdaptiveBackoff::kPauseMax + 1);
  CHECK(made(attempts, 10 * AdaptiveBackoff::kPauseMax, false) > 5);
}

TEST_CASE("what works again is attempted at every occasion after one pause") {
  AdaptiveBackoff attempts;
  made(attempts, 10000, false);
  CHECK(made(attempts, 2 * AdaptiveBackoff::kPauseMax, true) >= AdaptiveBackoff::kPauseMax);
  CHECK(made(attempts, 1000, true) == 1000);
}

TEST_CASE("a failure among many that worked changes nothing") {
  AdaptiveBackoff attempts;
  made(attempts, 20, true);
  attempts.note(false);
  CHECK(made(attempts, 100, true) == 100);
}
