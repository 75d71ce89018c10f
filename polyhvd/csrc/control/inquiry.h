// Inquiries of rank 0 about ranks that others wait for, and the answers. Plain
// values; wire.h encodes them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace polyhvd {

inline constexpr std::size_t kRanksAskedMax = 256;
inline constexpr std::size_t kAnswerBytesMax = 64 << 10;

struct Inquiry {
  std::uint32_t number = 0;
  std::vector<std::int32_t> ranks;
};

// By the rank itself, or by another of its host that has looked at its process.
struct Answer {
  std::uint32_t inquiry = 0;
  std::int32_t rank = 0;
  bool conclusive = false;  // false: the rank may still answer itself
  std::string text;         // "alive, in load (train.py:88); ...", then its stacks, line by line
};

}  // namespace polyhvd
