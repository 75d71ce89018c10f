// What the ranks of a process set exchange before NCCL connects them, and whether that
// can go well. Pure.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace polyhvd::nccl {

// Of one rank; travels as it lies in memory.
struct Offer {
  std::int32_t version = 0;  // of its NCCL; 0: it has none
  std::int32_t shares_gpus = 0;
  std::array<char, 64> gpu{};      // its uuid, in hexadecimal
  std::array<char, 256> reason{};  // why it has none
};

// Cut to what fits.
template <std::size_t n>
void put(std::array<char, n>& to, std::string_view text) {
  to.fill('\0');
  text.copy(to.data(), n - 1);
}

// Why NCCL cannot serve these ranks, all that stand in the way; nothing when it can. `name_of`
// returns the rank of a position.
std::optional<std::string> objection(std::span<const Offer> offers,
                                     const std::function<std::string(std::size_t)>& name_of);

}  // namespace polyhvd::nccl
