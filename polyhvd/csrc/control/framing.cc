#include "control/framing.h"

#include <cstdint>
#include <cstring>
#include <span>

#include "control/crc32c.h"
#include "control/error.h"
#include "control/wire.h"

namespace polyhvd {

namespace {

struct Header {
  std::uint32_t length;
  std::uint32_t payload_crc;
  std::uint32_t crc;
};
static_assert(sizeof(Header) == kFrameHeaderBytes);

// Of what stands before it, and of the frame's number, which is not sent.
std::uint32_t crc_of(const Header& header, std::uint32_t number) noexcept {
  const std::uint32_t words[] = {header.length, header.payload_crc, number};
  return crc32c(std::as_bytes(std::span(words)));
}

}  // namespace

void FrameWriter::append(std::string& stream, std::string_view payload) {
  Header header{static_cast<std::uint32_t>(payload.size()),
                crc32c(std::as_bytes(std::span(payload))), 0};
  header.crc = crc_of(header, count_++);
  stream.append(reinterpret_cast<const char*>(&header), sizeof header);
  stream.append(payload);
}

void StreamBuffer::append(const std::byte* bytes, std::size_t count) {
  if (consumed_ == bytes_.size()) {
    bytes_.clear();
    consumed_ = 0;
  }
  bytes_.append(reinterpret_cast<const char*>(bytes), count);
}

void StreamBuffer::consume(std::size_t count) {
  consumed_ += count;
  if (consumed_ > (1u << 20)) {  // keeps a long-lived stream from growing
    bytes_.erase(0, consumed_);
    consumed_ = 0;
  }
}

bool FrameReader::next(std::string& payload) {
  const std::string_view unread = received_.unread();
  if (unread.size() < kFrameHeaderBytes) return false;
  Header header;
  std::memcpy(&header, unread.data(), sizeof header);
  // Before the length is believed: waiting for bytes that are never sent has no end.
  if (crc_of(header, count_) != header.crc || header.length > kFrameBytesMax) {
    throw Failure(ErrorCode::kPeerLost,
                  "the header of a frame fails its checksum: bytes were changed, lost or inserted");
  }
  if (unread.size() - kFrameHeaderBytes < header.length) return false;
  ++count_;
  payload.assign(unread.substr(kFrameHeaderBytes, header.length));
  received_.consume(kFrameHeaderBytes + header.length);
  if (crc32c(std::as_bytes(std::span(payload))) != header.payload_crc) {
    throw Failure(ErrorCode::kPeerLost,
                  "a frame fails its checksum: bytes were changed, lost or inserted");
  }
  return true;
}

}  // namespace polyhvd
