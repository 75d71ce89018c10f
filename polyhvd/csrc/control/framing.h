// Frames over a stream of bytes, with checksums: messages within a host. Format in wire.h.
// Between hosts they carry MACs: signed_framing.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace polyhvd {

// What has come of a stream, and was not taken yet.
class StreamBuffer {
 public:
  void append(const std::byte* bytes, std::size_t count);
  // Valid until the next call.
  std::string_view unread() const noexcept { return std::string_view(bytes_).substr(consumed_); }
  void consume(std::size_t count);

 private:
  std::string bytes_;
  std::size_t consumed_ = 0;
};

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
  void append(const std::byte* bytes, std::size_t count) { received_.append(bytes, count); }
  // Takes the next whole payload. Throws Failure(kPeerLost) on a bad length or
  // checksum: the connection cannot be trusted any more.
  bool next(std::string& payload);

 private:
  StreamBuffer received_;
  std::uint32_t count_ = 0;
};

}  // namespace polyhvd
