// Copies of many pieces of memory at once, as an elastic state keeps its tensors. Pure; any thread.
#pragma once

#include <cstddef>
#include <span>

namespace polyhvd::host {

struct Piece {
  std::byte* to;
  const std::byte* from;
  std::size_t bytes;
};

// Overlaps nothing but itself: no target has a byte of another piece. Pointers need no
// alignment. All of it is there for every thread when this returns.
void copy_pieces(std::span<const Piece> pieces) noexcept;

// From so many bytes on in all, they are written past the caches.
inline constexpr std::size_t kStreamedFrom = std::size_t{4} << 20;

}  // namespace polyhvd::host
