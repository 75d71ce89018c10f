#include "host/staged/staging_writer.h"

#include <cstring>

#include "host/copy.h"
#include "observe/ticks.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace polyhvd::host {

void StagingWriter::write(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  if (bytes < kBytesMin || !can_pass_caches()) return copy_bytes(to, from, bytes);
  const Store store = choice_.next();
  const Ticks begin = ticks_now();
  store == Store::kPlain ? copy_bytes(to, from, bytes) : copy_past_caches(to, from, bytes);
  choice_.note(store, static_cast<float>(ticks_now() - begin) / static_cast<float>(bytes));
}

#if defined(__SSE2__)

bool can_pass_caches() noexcept { return true; }

void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  constexpr std::size_t kBlock = sizeof(__m128i);
  constexpr std::size_t kLine = 64;
  const std::size_t head = (kLine - reinterpret_cast<std::uintptr_t>(to) % kLine) % kLine;
  if (bytes < head + kLine) {
    std::memcpy(to, from, bytes);
    return;
  }
  std::memcpy(to, from, head);
  to += head;
  from += head;
  bytes -= head;
  for (; bytes >= kLine; bytes -= kLine, to += kLine, from += kLine) {
    __m128i line[kLine / kBlock];
    for (std::size_t i = 0; i < kLine / kBlock; ++i) {
      line[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + i);
    }
    for (std::size_t i = 0; i < kLine / kBlock; ++i) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to) + i, line[i]);
    }
  }
  std::memcpy(to, from, bytes);
  _mm_sfence();
}

#else

bool can_pass_caches() noexcept { return false; }

void copy_past_caches(std::byte* to, const std::byte* from, std::size_t bytes) noexcept {
  std::memcpy(to, from, bytes);
}

#endif

}  // namespace polyhvd::host
