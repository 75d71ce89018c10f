// memcpy between staging areas and tensors.
//
// glibc copies 4 KiB and more with rep movsb, which on Zen 3 and 4 falls from 40 GB/s to 2
// where the target begins 1 to 31 bytes after the source in its page (glibc bug 30994).
// NumPy's large arrays begin 16 bytes after a page's start, and staging areas at it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace polyhvd::host {

inline void copy_bytes(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  using Block [[gnu::vector_size(16), gnu::aligned(1), gnu::may_alias]] = std::int64_t;
  constexpr std::size_t kBlocks = 4;
  constexpr std::size_t kStepBytes = kBlocks * sizeof(Block);
  constexpr std::size_t kSlowFrom = 4096;
  const std::uintptr_t ahead =
      (reinterpret_cast<std::uintptr_t>(to) - reinterpret_cast<std::uintptr_t>(from)) % 4096;
  if (bytes < kSlowFrom || ahead == 0 || ahead >= 32) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (; bytes >= kStepBytes; bytes -= kStepBytes, to += kStepBytes, from += kStepBytes) {
    Block blocks[kBlocks];
    for (std::size_t i = 0; i < kBlocks; ++i) {
      blocks[i] = *reinterpret_cast<const Block*>(from + i * sizeof(Block));
    }
    for (std::size_t i = 0; i < kBlocks; ++i) {
      *reinterpret_cast<Block*>(to + i * sizeof(Block)) = blocks[i];
    }
    asm volatile("" ::: "memory");  // or the compiler makes a memcpy of the loop
  }
  std::memcpy(to, from, bytes);
}

}  // namespace polyhvd::host
