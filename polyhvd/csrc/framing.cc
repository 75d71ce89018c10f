#include "framing.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "error.h"
#include "wire.h"

namespace polyhvd {

namespace {

struct Header {
  std::uint32_t length;
  std::uint32_t payload_crc;
  std::uint32_t crc;  // of the two above
};
static_assert(sizeof(Header) == kFrameHeaderBytes);

std::uint32_t crc_of(const Header& header) noexcept {
  return crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(Header, crc)));
}

}  // namespace

void append_frame(std::string& stream, std::string_view payload) {
  Header header{static_cast<std::uint32_t>(payload.size()),
                crc32c(std::as_bytes(std::span(payload))), 0};
  header.crc = crc_of(header);
  stream.append(reinterpret_cast<const char*>(&header), sizeof header);
  stream.append(payload);
}

void FrameReader::append(const std::byte* bytes, std::size_t count) {
  if (consumed_ == buffer_.size()) {
    buffer_.clear();
    consumed_ = 0;
  }
  buffer_.append(reinterpret_cast<const char*>(bytes), count);
}

bool FrameReader::next(std::string& payload) {
  const std::size_t available = buffer_.size() - consumed_;
  if (available < kFrameHeaderBytes) return false;
  Header header;
  std::memcpy(&header, buffer_.data() + consumed_, sizeof header);
  // Before the length is believed: waiting for bytes that nobody sends has no end.
  if (crc_of(header) != header.crc || header.length > kFrameBytesMax) {
    throw Failure(ErrorCode::kPeerLost,
                  "the header of a control frame fails its checksum: the connection is garbled");
  }
  if (available - kFrameHeaderBytes < header.length) return false;
  payload.assign(buffer_, consumed_ + kFrameHeaderBytes, header.length);
  consumed_ += kFrameHeaderBytes + header.length;
  if (crc32c(std::as_bytes(std::span(payload))) != header.payload_crc) {
    throw Failure(ErrorCode::kPeerLost,
                  "a control frame fails its checksum: the connection is garbled");
  }
  if (consumed_ > (1u << 20)) {  // keeps a long-lived stream from growing
    buffer_.erase(0, consumed_);
    consumed_ = 0;
  }
  return true;
}

}  // namespace polyhvd
