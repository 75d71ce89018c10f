// Copies of many pieces: all bytes arrive, and none beside them.
#include <doctest/doctest.h>

#include <cstddef>
#include <random>
#include <vector>

#include "host/copies.h"

namespace {

using namespace polyhvd::host;

constexpr std::size_t kGap = 64;  // that no piece may touch
constexpr std::byte kUntouched{0xa5};

struct Layout {
  std::vector<std::byte> from;
  std::vector<std::byte> to;
  std::vector<std::byte> expected;
  std::vector<Piece> pieces;
};

// Pieces of these sizes, at whatever alignment `shift` and the sizes lead to.
Layout layout_of(const std::vector<std::size_t>& sizes, std::size_t shift) {
  std::size_t all = kGap;
  for (const std::size_t size : sizes) all += size + kGap;
  Layout made;
  std::mt19937 random(static_cast<unsigned>(all + shift));
  made.from.resize(all + shift);
  for (std::byte& byte : made.from) byte = static_cast<std::byte>(random());
  made.to.assign(all, kUntouched);
  made.expected = made.to;
  std::size_t at = kGap;
  for (const std::size_t size : sizes) {
    made.pieces.push_back({made.to.data() + at, made.from.data() + at + shift, size});
    for (std::size_t i = 0; i < size; ++i) made.expected[at + i] = made.from[at + shift + i];
    at += size + kGap;
  }
  return made;
}

// Not by CHECK(a == b), which would print megabytes.
bool arrives(const std::vector<std::size_t>& sizes, std::size_t shift) {
  Layout layout = layout_of(sizes, shift);
  copy_pieces(layout.pieces);
  return layout.to == layout.expected;
}

TEST_CASE("pieces of any size and alignment arrive whole, and nothing beside them is written") {
  std::vector<std::size_t> small;
  for (std::size_t size = 0; size < 200; ++size) small.push_back(size);
  std::vector<std::size_t> large = small;
  large.push_back(kStreamedFrom);  // so that the small ones are streamed, too
  for (const std::size_t size : {4095u, 4096u, 4097u, 70001u}) {
    small.push_back(size);
    large.push_back(size);
  }
  for (std::size_t shift = 0; shift < 70; shift += 3) {
    CAPTURE(shift);
    CHECK(arrives(small, shift));
    CHECK(arrives(large, shift));
  }
}

TEST_CASE("no pieces, and empty ones that are nowhere, are copied") {
  copy_pieces({});
  const std::vector<Piece> nowhere{{nullptr, nullptr, 0}};
  copy_pieces(nowhere);
  Layout layout = layout_of({kStreamedFrom}, 1);
  layout.pieces.push_back(nowhere.front());
  copy_pieces(layout.pieces);
  CHECK((layout.to == layout.expected));
}

}  // namespace
