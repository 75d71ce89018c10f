// Keyed BLAKE2b (RFC 7693) with tags of 16 bytes: what shows that bytes come, unchanged, from
// who knows the key. Pure.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace polyhvd {

inline constexpr std::size_t kKeyBytes = 32;
inline constexpr std::size_t kTagBytes = 16;
using Key = std::array<std::byte, kKeyBytes>;
using Tag = std::array<std::byte, kTagBytes>;

// Of one connection, as one of its ends sees it; polyhvd/rendezvous/auth.py makes them.
struct SessionKeys {
  Key send{};
  Key receive{};
};

class Mac {
 public:
  explicit Mac(const Key& key) noexcept;

  // Of `head` and then `body`, which together must not be empty.
  Tag of(std::span<const std::byte> head, std::span<const std::byte> body = {}) const noexcept;

 private:
  std::array<std::uint64_t, 8> keyed_;  // the state behind the key, which fills a block
};

// In a time that does not depend on where they differ.
bool is_same(const Tag& tag, std::span<const std::byte, kTagBytes> other) noexcept;

}  // namespace polyhvd
