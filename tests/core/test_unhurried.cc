// Operations that no rank waits for, by their names.
#include <doctest/doctest.h>

#include <string>

#include "control/unhurried.h"
#include "thread_world.h"

namespace polyhvd {
namespace {

TEST_CASE("operations of the comparison of loaders are unhurried, and no others") {
  CHECK(is_unhurried("polyhvd.data/ParquetLoader(train.py:12).0123.1"));
  CHECK(is_unhurried("polyhvd.data/"));
  for (const std::string name :
       {"", "polyhvd.data", "polyhvd.database/", "my polyhvd.data/", "Polyhvd.data/", "gradient"}) {
    CAPTURE(name);
    CHECK_FALSE(is_unhurried(name));
  }
}

TEST_CASE("time is counted as waiting only while an operation that is not unhurried waits") {
  test::ThreadWorld world(test::one_host(2));
  world.run([](int, Engine& engine) {
    std::vector<float> values{1};
    engine.wait(engine.submit(test::allreduce("polyhvd.data/loader.1", values), true));
    CHECK(engine.waits().agreed == 0);
    CHECK(engine.waits().seconds == 0);
    engine.wait(engine.submit(test::allreduce("gradient", values), true));
    CHECK(engine.waits().agreed == 1);
    CHECK(engine.waits().seconds > 0);
  });
  world.shutdown();
}

}  // namespace
}  // namespace polyhvd
