// Frames with MACs over a stream of bytes: control messages between hosts. The same records
// as those of polyhvd/rendezvous/signed_stream.py.
//
// A frame is [u32 length][tag of the header][payload][tag of the payload], little endian; one
// with an empty payload, a heartbeat, ends with its header. Both tags cover the frame's number
// in its stream, which is not sent: what was replayed, put in another place or left out
// is found at once, or by the frame that follows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "control/framing.h"
#include "control/mac.h"

namespace polyhvd {

class SignedFrameWriter {
 public:
  explicit SignedFrameWriter(const Key& key) noexcept : mac_(key) {}

  // Appends one frame around `payload`.
  void append(std::string& stream, std::string_view payload);

 private:
  Mac mac_;
  std::uint64_t count_ = 0;
};

class SignedFrameReader {
 public:
  explicit SignedFrameReader(const Key& key) noexcept : mac_(key) {}

  void append(const std::byte* bytes, std::size_t count) { received_.append(bytes, count); }
  // Takes the next whole payload. Throws Failure(kPeerLost), now and ever after, on a frame
  // that the other end did not send as the next one.
  bool next(std::string& payload);

 private:
  void check(std::string_view covered, std::string_view tag) const;

  Mac mac_;
  StreamBuffer received_;
  std::optional<std::uint32_t> length_;  // of the next frame, once its header is proved
  std::uint64_t count_ = 0;
};

}  // namespace polyhvd
