// How an allreduce is cut into slices and chunks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "shm/segment.h"

namespace polyhvd::host {

// Below, more time goes into steps than into bytes.
inline constexpr std::uint32_t kChunkBytesMin = 4 << 10;

// How an operation's bytes are cut: one slice per owner, in chunks. Computed from
// only what was agreed, so it is equal on all ranks.
struct Slices {
  std::size_t total;
  std::size_t slice;
  std::size_t chunk;
  std::size_t steps;

  Slices(std::size_t bytes, std::size_t item, int owners, std::size_t chunk_bytes) : total(bytes) {
    const std::size_t unit = shm::kCacheLine * item;  // whole elements, whole cache lines
    const auto n = static_cast<std::size_t>(owners);
    slice = ((bytes + n - 1) / n + unit - 1) / unit * unit;
    chunk = std::max(chunk_bytes / item * item, item);
    steps = (slice + chunk - 1) / chunk;
  }
  std::size_t begin(int owner) const {
    return std::min(total, slice * static_cast<std::size_t>(owner));
  }
  std::size_t size(int owner) const { return begin(owner + 1) - begin(owner); }
  std::size_t bytes_of(int owner, std::size_t step) const {
    const std::size_t at = step * chunk;
    return at >= size(owner) ? 0 : std::min(chunk, size(owner) - at);
  }
};

// What each host adds of a run of bytes, in order of hosts: whole cache lines of elements.
struct Pieces {
  Pieces() = default;
  Pieces(std::size_t bytes, std::size_t item, int hosts) : total(bytes) {
    const std::size_t unit = shm::kCacheLine * item;
    const auto n = static_cast<std::size_t>(hosts);
    piece = ((bytes + n - 1) / n + unit - 1) / unit * unit;
  }
  std::size_t begin(std::size_t host) const noexcept { return std::min(total, host * piece); }
  std::size_t size(std::size_t host) const noexcept { return begin(host + 1) - begin(host); }

  std::size_t total = 0;
  std::size_t piece = 0;
};

}  // namespace polyhvd::host
