#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "host/staged/staging_writer.h"

namespace polyhvd::host {
namespace {

// Cores whose stores cost, in ticks per byte, what the test says.
struct Cores {
  float plain;
  float past_caches;
  float cost(Store store) const { return store == Store::kPlain ? plain : past_caches; }
};

constexpr Cores kNear{0.07F, 0.18F};
constexpr Cores kFar{0.57F, 0.11F};

// How many of the next `stores` go past the caches.
int past_caches(StoreChoice& choice, Cores cores, int stores) {
  int count = 0;
  for (int i = 0; i < stores; ++i) {
    const Store store = choice.next();
    choice.note(store, cores.cost(store));
    if (store == Store::kPastCaches) ++count;
  }
  return count;
}

constexpr int kMany = 10 * kStoreHabit.trial_every;

TEST_CASE("near cores store plainly, but for a trial now and then") {
  StoreChoice choice(kStoreHabit);
  CHECK(choice.next() == Store::kPlain);
  choice.note(Store::kPlain, kNear.plain);
  CHECK(past_caches(choice, kNear, kMany) == 10);
  CHECK(choice.usual() == Store::kPlain);
}

TEST_CASE("far cores store past the caches, once that was tried") {
  StoreChoice choice(kStoreHabit);
  past_caches(choice, kFar, kStoreHabit.first_trial);
  CHECK(choice.usual() == Store::kPastCaches);
  CHECK(past_caches(choice, kFar, kMany) == kMany - 10);
}

TEST_CASE("cores that move apart are noticed by the second slow store") {
  StoreChoice choice(kStoreHabit);
  past_caches(choice, kNear, kMany + kStoreHabit.trial_every / 2);
  past_caches(choice, kFar, 2);
  CHECK(choice.usual() == Store::kPastCaches);
}

TEST_CASE("cores that move together are noticed by the next trial") {
  StoreChoice choice(kStoreHabit);
  past_caches(choice, kFar, kMany);
  past_caches(choice, kNear, kStoreHabit.trial_every);
  CHECK(choice.usual() == Store::kPlain);
}

TEST_CASE("a store in the middle of which the core was lost counts for nothing") {
  StoreChoice choice(kStoreHabit);
  past_caches(choice, kNear, kMany + 1);
  choice.note(Store::kPlain, 4000.0F);
  CHECK(choice.usual() == Store::kPlain);
  past_caches(choice, kFar, kMany);
  choice.note(Store::kPastCaches, 4000.0F);
  CHECK(choice.usual() == Store::kPastCaches);
}

TEST_CASE("every byte is copied past the caches, and none beyond") {
  constexpr std::size_t kRoom = 1024;
  constexpr auto kUntouched = std::byte{0xee};
  std::vector<std::byte> source(kRoom);
  for (std::size_t i = 0; i < kRoom; ++i) source[i] = static_cast<std::byte>(i * 7 % 251);
  for (const std::size_t to : {0, 1, 15, 16, 63, 64, 65}) {
    for (const std::size_t from : {0, 1, 16, 33}) {
      for (std::size_t bytes = 0; bytes < 400; bytes += bytes < 70 ? 1 : 13) {
        std::vector<std::byte> target(kRoom, kUntouched);
        copy_past_caches(target.data() + to, source.data() + from, bytes);
        std::vector<std::byte> expected(kRoom, kUntouched);
        std::copy_n(source.begin() + static_cast<std::ptrdiff_t>(from), bytes,
                    expected.begin() + static_cast<std::ptrdiff_t>(to));
        REQUIRE(target == expected);
      }
    }
  }
}

TEST_CASE("a writer writes the same bytes whichever way it takes") {
  StagingWriter writer;
  std::vector<std::byte> source(StagingWriter::kBytesMin + 100);
  for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i % 253);
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{100}, source.size()}) {
    for (int i = 0; i < 2 * kStoreHabit.trial_every; ++i) {
      std::vector<std::byte> target(bytes);
      writer.write(target.data(), source.data(), bytes);
      REQUIRE(std::equal(target.begin(), target.end(), source.begin()));
    }
  }
}

}  // namespace
}  // namespace polyhvd::host
