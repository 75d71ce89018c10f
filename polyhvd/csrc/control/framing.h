// Frames over a stream of bytes: what shared-memory and TCP channels have in
// common. Format in wire.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace polyhvd {

// Writer and reader of a stream count its frames, so that one that was lost or came
// twice is noticed at the next.
class FrameWriter {
 public:
  // Appends one frame around `payload`.
  void append(std::string& stream, std::string_view payload);

 private:
  std::uint32_t count_ = 0;
};

class FrameReader {
 public:
  void append(const std::byte* bytes, std::size_t count);
  // Takes the next whole payload. Throws Failure(kPeerLost) on a bad length or
  // checksum: the connection cannot be trusted any more.
  bool next(std::string& payload);

 private:
  std::string buffer_;
  std::size_t consumed_ = 0;
  std::uint32_t count_ = 0;
};

}  // namespace polyhvd
