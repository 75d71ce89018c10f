// Writes into staging areas, in whichever of two ways is faster at present.
//
// A line that the other rank has read lies in the cache of its core. Where the two cores
// share a cache, to write it again costs next to nothing; where they do not (sockets, core
// complexes, a hypervisor that moves its processors about) it must be fetched from the far
// cache first. Stores that pass the caches by need no line, but the reader then goes to
// memory. Zen 3, GB/s, 128 KB at a time: plain 33 and 4, past the caches 13 and 21; what is
// read then comes with 24, 12, 13 and 15.
#pragma once

#include <cstddef>
#include <cstdint>

#include "host/cost_choice.h"

namespace polyhvd::host {

enum class Store : std::uint8_t { kPlain = 0, kPastCaches = 1 };

// Plain stores must cost 1.7 times as much, since the reader of the others pays as well. To
// fetch the source from memory is part of either cost. Pages are new before the eighth.
using StoreChoice = CostChoice<Store>;
inline constexpr StoreChoice::Habit kStoreHabit{
    .advantage = 1.7F, .first_trial = 8, .trial_every = 64, .trials_in_row = 1};

class StagingWriter {
 public:
  // Shorter pieces show little about their method.
  static constexpr std::size_t kBytesMin = 16 << 10;

  void write(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
  // Whether write() usually goes past the caches for this many bytes.
  bool goes_past_caches(std::size_t bytes) const noexcept {
    return bytes >= kBytesMin && choice_.usual() == Store::kPastCaches;
  }

 private:
  StoreChoice choice_{kStoreHabit};
};

// As memcpy, past the caches where the processor can; other threads see the bytes once
// this returns and something is published to them.
void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
bool can_pass_caches() noexcept;

}  // namespace polyhvd::host
