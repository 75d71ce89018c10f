// What may change while a job runs, on all ranks at one point of the total order. No
// result depends on any of it: only when and in which pieces bytes move.
#pragma once

#include <cstdint>

namespace polyhvd {

struct Tuning {
  std::uint64_t fusion_bytes_max = 128u << 20;  // of the operations that run as one
  std::uint32_t cycle_us = 1000;                // longest batching window
  std::uint32_t chunk_bytes = 128u << 10;       // that a rank stages for another at a time
  std::uint32_t direct_bytes_max = 128u << 10;  // in all, for one exchange instead of two
  std::uint32_t notice = 0;                     // the last that the program is to be given
  friend bool operator==(const Tuning&, const Tuning&) = default;
};

}  // namespace polyhvd
