// Operations that no rank waits for, by their names.
#include <doctest/doctest.h>

#include <string>

#include "control/unhurried.h"

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

}  // namespace
}  // namespace polyhvd
