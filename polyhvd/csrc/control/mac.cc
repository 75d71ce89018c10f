#include "control/mac.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace polyhvd {
namespace {

using State = std::array<std::uint64_t, 8>;

constexpr std::size_t kBlockBytes = 128;
constexpr int kRounds = 12;

constexpr State kStart{0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                       0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                       0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

// The order of the words of a block in each round; rounds 10 and 11 start over.
constexpr std::uint8_t kOrder[10][16] = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15},
                                         {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
                                         {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4},
                                         {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
                                         {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13},
                                         {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
                                         {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11},
                                         {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
                                         {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5},
                                         {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

struct Columns {
  std::uint64_t v[16];

  void mix(int a, int b, int c, int d, std::uint64_t x, std::uint64_t y) noexcept {
    v[a] += v[b] + x;
    v[d] = std::rotr(v[d] ^ v[a], 32);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 24);
    v[a] += v[b] + y;
    v[d] = std::rotr(v[d] ^ v[a], 16);
    v[c] += v[d];
    v[b] = std::rotr(v[b] ^ v[c], 63);
  }
};

// `end`: bytes up to the end of the block.
void compress(State& state, const std::byte* block, std::uint64_t end, bool last) noexcept {
  std::uint64_t m[16];
  std::memcpy(m, block, sizeof m);
  Columns columns;
  std::uint64_t* v = columns.v;
  std::ranges::copy(state, v);
  std::ranges::copy(kStart, v + 8);
  v[12] ^= end;
  if (last) v[14] = ~v[14];
  for (int round = 0; round < kRounds; ++round) {
    const std::uint8_t* s = kOrder[round % 10];
    columns.mix(0, 4, 8, 12, m[s[0]], m[s[1]]);
    columns.mix(1, 5, 9, 13, m[s[2]], m[s[3]]);
    columns.mix(2, 6, 10, 14, m[s[4]], m[s[5]]);
    columns.mix(3, 7, 11, 15, m[s[6]], m[s[7]]);
    columns.mix(0, 5, 10, 15, m[s[8]], m[s[9]]);
    columns.mix(1, 6, 11, 12, m[s[10]], m[s[11]]);
    columns.mix(2, 7, 8, 13, m[s[12]], m[s[13]]);
    columns.mix(3, 4, 9, 14, m[s[14]], m[s[15]]);
  }
  for (int i = 0; i < 8; ++i) state[static_cast<std::size_t>(i)] ^= v[i] ^ v[i + 8];
}

}  // namespace

Mac::Mac(const Key& key) noexcept : keyed_(kStart) {
  keyed_[0] ^= 0x01010000u ^ kKeyBytes << 8 ^ kTagBytes;
  std::array<std::byte, kBlockBytes> block{};
  std::ranges::copy(key, block.begin());
  compress(keyed_, block.data(), kBlockBytes, false);
}

Tag Mac::of(std::span<const std::byte> head, std::span<const std::byte> body) const noexcept {
  State state = keyed_;
  std::array<std::byte, kBlockBytes> block;
  std::uint64_t end = kBlockBytes;  // the key's
  std::size_t filled = 0;
  for (std::span<const std::byte> part : {head, body}) {
    while (!part.empty()) {
      if (filled == kBlockBytes) {  // another one follows, so it is not the last
        compress(state, block.data(), end += kBlockBytes, false);
        filled = 0;
      }
      for (; filled == 0 && part.size() > kBlockBytes; part = part.subspan(kBlockBytes)) {
        compress(state, part.data(), end += kBlockBytes, false);
      }
      const std::size_t count = std::min(kBlockBytes - filled, part.size());
      std::memcpy(block.data() + filled, part.data(), count);
      filled += count;
      part = part.subspan(count);
    }
  }
  std::memset(block.data() + filled, 0, kBlockBytes - filled);
  compress(state, block.data(), end + filled, true);
  Tag tag;
  std::memcpy(tag.data(), state.data(), tag.size());
  return tag;
}

bool is_same(const Tag& tag, std::span<const std::byte, kTagBytes> other) noexcept {
  std::byte differing{};
  for (std::size_t i = 0; i < kTagBytes; ++i) differing |= tag[i] ^ other[i];
  return differing == std::byte{};
}

}  // namespace polyhvd
