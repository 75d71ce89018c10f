// What backends ask of the segments of a fused operation, and of members' shares.
#pragma once

#include <algorithm>
#include <cstddef>

#include "backend.h"

namespace polyhvd {

inline std::size_t total_bytes(Segments segments) noexcept {
  std::size_t total = 0;
  for (const Segment& segment : segments) total += segment.bytes;
  return total;
}

inline bool are_equal(Counts counts) noexcept {
  return std::ranges::all_of(counts, [&](std::size_t count) { return count == counts[0]; });
}

}  // namespace polyhvd
