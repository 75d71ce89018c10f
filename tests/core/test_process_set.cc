#include <doctest/doctest.h>

#include <optional>
#include <vector>

#include "control/error.h"
#include "control/process_set.h"

namespace polyhvd {
namespace {

ErrorCode code_of_adding(ProcessSets& sets, std::vector<int> ranks) {
  try {
    sets.add(std::move(ranks));
  } catch (const Failure& failure) {
    return failure.error().code;
  }
  return {};
}

TEST_CASE("set 0 is the world, ranks in order") {
  const ProcessSets sets(3);
  const auto world = sets.members(kWorld);
  CHECK(std::vector<int>(world.begin(), world.end()) == std::vector<int>{0, 1, 2});
  CHECK(sets.position(kWorld, 2) == 2);
  CHECK(sets.world_size() == 3);
}

TEST_CASE("a position is the place among the members, not the world rank") {
  ProcessSets sets(8);
  const ProcessSetId id = sets.add({1, 4, 6});
  CHECK(sets.position(id, 1) == 0);
  CHECK(sets.position(id, 4) == 1);
  CHECK(sets.position(id, 6) == 2);
}

TEST_CASE("ranks outside a set, outside the world, and unknown sets have no position") {
  ProcessSets sets(8);
  const ProcessSetId id = sets.add({0, 1, 5});
  for (const int rank : {-1, 2, 4, 6, 7, 8, 1000}) CHECK(sets.position(id, rank) == std::nullopt);
  CHECK(sets.position(id + 1, 0) == std::nullopt);
  CHECK(sets.position(kWorld, 8) == std::nullopt);
}

TEST_CASE("ids are given in order and equal sets get ids of their own") {
  ProcessSets sets(4);
  CHECK(sets.add({0, 1}) == 1);
  CHECK(sets.add({0, 1}) == 2);
  CHECK(sets.ids() == std::vector<ProcessSetId>{0, 1, 2});
  CHECK(sets.contains(2));
  CHECK_FALSE(sets.contains(3));
}

TEST_CASE("ranks that are no sorted, distinct part of the world are refused") {
  ProcessSets sets(4);
  for (const std::vector<int>& ranks :
       {std::vector<int>{}, {1, 0}, {1, 1}, {-1, 0}, {3, 4}, {0, 2, 1}}) {
    CHECK(code_of_adding(sets, ranks) == ErrorCode::kInvalidArgument);
  }
  CHECK(sets.ids().size() == 1);
}

TEST_CASE("a process set beyond the limit is refused, and fits after another one is removed") {
  ProcessSets sets(11);
  ProcessSetId last = kWorld;
  for (int bits = 1; bits < static_cast<int>(kProcessSetsMax); ++bits) {
    std::vector<int> ranks;
    for (int rank = 0; rank < 11; ++rank) {
      if ((bits >> rank & 1) != 0) ranks.push_back(rank);
    }
    last = sets.add(ranks);
  }
  const std::vector<int> all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  CHECK_THROWS_WITH_AS(
      sets.add(all), "there are 1024 process sets, which is the limit; remove one first", Failure);
  sets.remove(last);
  CHECK(sets.members(sets.add(all)).size() == 11);
}

TEST_CASE("a world without ranks is refused") { CHECK_THROWS_AS(ProcessSets(0), Failure); }

TEST_CASE("members stay where they are when sets are added") {
  ProcessSets sets(64);
  const ProcessSetId id = sets.add({3, 5});
  const auto before = sets.members(id);
  for (int i = 0; i < 63; ++i) sets.add({i, i + 1});
  CHECK(sets.members(id).data() == before.data());
}

TEST_CASE("a mask counts each member once, beyond the first word too") {
  MemberMask mask(130);
  for (const std::size_t i : {0u, 63u, 64u, 129u}) {
    CHECK_FALSE(mask.contains(i));
    CHECK(mask.insert(i));
    CHECK_FALSE(mask.insert(i));
    CHECK(mask.contains(i));
  }
  CHECK(mask.count() == 4);
  CHECK_FALSE(mask.contains(65));
  mask.clear();
  CHECK(mask.empty());
  CHECK_FALSE(mask.contains(129));
}

}  // namespace
}  // namespace polyhvd
