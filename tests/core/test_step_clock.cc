// Steps of training: when one ends, and how long the last ones took.
#include <doctest/doctest.h>

#include "observe/step_clock.h"

namespace polyhvd {
namespace {

TEST_CASE("a step ends when the operation that began it comes again") {
  StepClock clock;
  Ticks now = 0;
  for (int step = 0; step < 5; ++step) {
    for (const std::size_t key : {7, 8, 9}) clock.note(key, now += 10);
  }
  CHECK(clock.steps() == 3);  // the first one may have begun before
  CHECK(clock.step() == 30);
}

TEST_CASE("operations that come once begin no step") {
  StepClock clock;
  for (std::size_t key = 1; key <= 1000; ++key) clock.note(key, key);
  CHECK(clock.steps() == 0);
  CHECK(clock.step() == 0);
  for (int step = 0; step < 4000; ++step) clock.note(5000, 1000 + static_cast<Ticks>(step));
  CHECK(clock.steps() > 1000);
  CHECK(clock.step() == 1);
}

TEST_CASE("steps are found soon after operations that come once") {
  for (std::size_t operations = 1; operations < 40; ++operations) {
    for (std::size_t once = 0; once <= 3 * operations; ++once) {
      StepClock clock;
      for (std::size_t key = 1; key <= once; ++key) clock.note(1000 + key, 0);
      for (int step = 0; step < 8; ++step) {
        for (std::size_t key = 1; key <= operations; ++key) clock.note(key, step);
      }
      CHECK(clock.steps() >= 3);
    }
  }
}

TEST_CASE("a pause does not change the median of the last steps") {
  StepClock clock;
  Ticks now = 0;
  for (int step = 0; step < 40; ++step) clock.note(1, now += step == 30 ? 1000 : 10);
  CHECK(clock.step() == 10);
}

}  // namespace
}  // namespace polyhvd
