// Frames over a stream of bytes: what shared-memory and TCP channels have in
// common. Format in wire.h.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace polyhvd {

// Appends one frame around `payload`.
void append_frame(std::string& stream, std::string_view payload);

class FrameReader {
 public:
  void append(const std::byte* bytes, std::size_t count);
  // Takes the next whole payload. Throws Failure(kPeerLost) on a bad length or
  // checksum: the connection cannot be trusted any more.
  bool next(std::string& payload);

 private:
  std::string buffer_;
  std::size_t consumed_ = 0;
};

}  // namespace polyhvd
