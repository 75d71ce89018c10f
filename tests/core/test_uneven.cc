// What is said of unequal data and unequal order.
#include <doctest/doctest.h>

#include <array>

#include "control/uneven.h"

namespace polyhvd {
namespace {

TEST_CASE("ordinals end as they are spoken") {
  CHECK(ordinal(1) == "1st");
  CHECK(ordinal(2) == "2nd");
  CHECK(ordinal(3) == "3rd");
  CHECK(ordinal(4) == "4th");
  CHECK(ordinal(11) == "11th");
  CHECK(ordinal(12) == "12th");
  CHECK(ordinal(113) == "113th");
  CHECK(ordinal(121) == "121st");
}

TEST_CASE("a rank that has left is reported with its count and the next one's") {
  const RunCount runs{120, true};
  const auto text =
      text_of_departed(OpKind::kAllreduce, "g", runs, std::array{0}, std::array{1, 2});
  CHECK(text ==
        "allreduce 'g' needs rank 0, which has shut down: it finished after its 120th allreduce of "
        "'g', while ranks 1, 2 are at their 121st: give every rank the same number of batches, or "
        "call "
        "hvd.join() on every rank when its data ends");
}

TEST_CASE("a count that is not known is not reported") {
  const RunCount runs{7, false};
  const auto text = text_of_uneven(OpKind::kAllgather, "g", runs, "it", std::array{3});
  CHECK(text.find("7th") == std::string::npos);
  CHECK(text.find("8th") == std::string::npos);
  CHECK(text.starts_with(" it finished before an allgather of 'g' that rank 3 waits for: "));
}

TEST_CASE("order is suspected only of ranks that wait for each other") {
  const Stalled a{kWorld, "a", std::chrono::seconds(9), {0}, {1}, OpKind::kAllreduce, {4, true}};
  const Stalled b{kWorld, "b", std::chrono::seconds(9), {1}, {0}, OpKind::kAllgather, {0, true}};
  const Stalled c{kWorld, "c", std::chrono::seconds(9), {0, 2}, {1}};
  CHECK(text_of_order(std::array{a, c}).empty());
  const std::string text = text_of_order(std::array{c, a, b});
  CHECK(text.find("ranks 0, 2 are at their 1st allreduce of 'c', rank 1 is at its 1st allgather of "
                  "'b'.") != std::string::npos);
  CHECK(text_of_order(std::array{b, a}) == text_of_order(std::array{a, b}));
}

}  // namespace
}  // namespace polyhvd
