#include "framing.h"

#include <cstdint>
#include <cstring>
#include <span>

#include "error.h"
#include "wire.h"

namespace polyhvd {

void append_frame(std::string& stream, std::string_view payload) {
  const auto length = static_cast<std::uint32_t>(payload.size());
  const std::uint32_t checksum = crc32c(std::as_bytes(std::span(payload)));
  char header[kFrameHeaderBytes];
  std::memcpy(header, &length, 4);
  std::memcpy(header + 4, &checksum, 4);
  stream.append(header, sizeof header);
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
  std::uint32_t length = 0;
  std::uint32_t checksum = 0;
  std::memcpy(&length, buffer_.data() + consumed_, 4);
  std::memcpy(&checksum, buffer_.data() + consumed_ + 4, 4);
  if (length > kFrameBytesMax) {
    throw Failure(ErrorCode::kPeerLost, "a control frame claims " + std::to_string(length) +
                                            " bytes: the connection is garbled");
  }
  if (available - kFrameHeaderBytes < length) return false;
  payload.assign(buffer_, consumed_ + kFrameHeaderBytes, length);
  consumed_ += kFrameHeaderBytes + length;
  if (crc32c(std::as_bytes(std::span(payload))) != checksum) {
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
