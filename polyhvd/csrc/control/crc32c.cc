#include "control/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>

#include "control/cpu_features.h"
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace polyhvd {
namespace {

constexpr std::array<std::uint32_t, 256> make_table() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = crc & 1 ? crc >> 1 ^ 0x82f63b78u : crc >> 1;
    table[byte] = crc;
  }
  return table;
}
constexpr auto kTable = make_table();

#if defined(__x86_64__)
#if defined(__clang__)
__attribute__((target("crc32")))  // which GCC 10 does not have
#else
__attribute__((target("sse4.2")))
#endif
std::uint32_t native(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  std::uint64_t crc = ~before;
  const std::byte* at = bytes.data();
  std::size_t remaining = bytes.size();
  for (; remaining >= 8; remaining -= 8, at += 8) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    crc = _mm_crc32_u64(crc, word);
  }
  auto tail = static_cast<std::uint32_t>(crc);
  for (; remaining > 0; --remaining, ++at)
    tail = _mm_crc32_u8(tail, static_cast<std::uint8_t>(*at));
  return ~tail;
}
bool has_instruction() noexcept { return cpu_features().sse4_2; }
#elif defined(__aarch64__)
__attribute__((target("+crc"))) std::uint32_t native(std::span<const std::byte> bytes,
                                                     std::uint32_t before) noexcept {
  std::uint32_t crc = ~before;
  const std::byte* at = bytes.data();
  std::size_t remaining = bytes.size();
  for (; remaining >= 8; remaining -= 8, at += 8) {
    std::uint64_t word;
    std::memcpy(&word, at, sizeof word);
    crc = __crc32cd(crc, word);
  }
  for (; remaining > 0; --remaining, ++at) crc = __crc32cb(crc, static_cast<std::uint8_t>(*at));
  return ~crc;
}
bool has_instruction() noexcept { return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
#else
std::uint32_t native(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  return crc32c_portable(bytes, before);
}
bool has_instruction() noexcept { return false; }
#endif

}  // namespace

std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  std::uint32_t crc = ~before;
  for (const std::byte byte : bytes) {
    crc = crc >> 8 ^ kTable[(crc ^ static_cast<std::uint32_t>(byte)) & 0xff];
  }
  return ~crc;
}

std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before) noexcept {
  static const bool has_native = has_instruction();
  return has_native ? native(bytes, before) : crc32c_portable(bytes, before);
}

}  // namespace polyhvd
