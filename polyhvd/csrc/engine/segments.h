// What backends ask of the segments of a fused operation.
#pragma once

#include <cstddef>

#include "engine/backend.h"

namespace polyhvd {

inline std::size_t total_bytes(Segments segments) noexcept {
  std::size_t total = 0;
  for (const Segment& segment : segments) total += segment.bytes;
  return total;
}

}  // namespace polyhvd
