// A target that is to be read much later need not be in a cache. memcpy knows that of one
// large piece; of many small ones it would read each line of the targets before writing it.
#include "copies.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "copy.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace polyhvd::host {
namespace {

#if defined(__x86_64__)

constexpr std::size_t kLine = 64;
constexpr std::size_t kPage = 4096;
// Lines of four pages are written in turn, and those that follow are asked for: memory then serves
// several of its rows at once. Stores of 32 and 64 bytes are hardly faster then.
constexpr std::size_t kPages = 4;

void copy_line(std::byte* to, const std::byte* from) noexcept {
  __m128i line[kLine / sizeof(__m128i)];
  for (std::size_t i = 0; i < std::size(line); ++i) {
    line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
  }
  for (std::size_t i = 0; i < std::size(line); ++i) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line[i]);
  }
}

void copy_streamed(const Piece& piece) noexcept {
  std::byte* to = piece.to;
  const std::byte* from = piece.from;
  const std::size_t past = reinterpret_cast<std::uintptr_t>(to) % kLine;
  const std::size_t before = std::min(past == 0 ? 0 : kLine - past, piece.bytes);
  if (before != 0) std::memcpy(to, from, before);
  std::size_t remaining = piece.bytes - before;
  to += before;
  from += before;
  const auto advance = [&](std::size_t bytes) {
    to += bytes;
    from += bytes;
    remaining -= bytes;
  };
  for (; remaining >= kPages * kPage; advance(kPages * kPage)) {
    for (std::size_t line = 0; line < kPage; line += kLine) {
      for (std::size_t at = line; at < kPages * kPage; at += kPage) {
        _mm_prefetch(reinterpret_cast<const char*>(from) + at + kPages * kPage, _MM_HINT_T0);
        copy_line(to + at, from + at);
      }
    }
  }
  for (; remaining >= kLine; advance(kLine)) copy_line(to, from);
  if (remaining != 0) std::memcpy(to, from, remaining);
}

// Other threads see such stores in any order until then.
void end_streams() noexcept { _mm_sfence(); }

#else

void copy_streamed(const Piece& piece) noexcept { copy_bytes(piece.to, piece.from, piece.bytes); }
void end_streams() noexcept {}

#endif

}  // namespace

void copy_pieces(std::span<const Piece> pieces) noexcept {
  std::size_t total = 0;
  for (const Piece& piece : pieces) total += piece.bytes;
  if (total < kStreamedFrom) {
    for (const Piece& piece : pieces) {
      if (piece.bytes != 0) copy_bytes(piece.to, piece.from, piece.bytes);
    }
    return;
  }
  for (const Piece& piece : pieces) copy_streamed(piece);
  end_streams();
}

}  // namespace polyhvd::host
