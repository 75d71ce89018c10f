// CRC-32C (Castagnoli, RFC 3720 appendix B.4): what finds bytes that a connection
// has changed. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace polyhvd {

// With the SSE4.2 or ARMv8 instruction where the machine has it. `before` is the
// checksum of the bytes that stand before these, for a stream that comes in pieces.
std::uint32_t crc32c(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

// The same from a table: for machines without the instruction.
std::uint32_t crc32c_portable(std::span<const std::byte> bytes, std::uint32_t before = 0) noexcept;

}  // namespace polyhvd
