#include "control/signed_framing.h"

#include <cstring>
#include <span>

#include "control/error.h"
#include "control/wire.h"

namespace polyhvd {
namespace {

using Length = std::uint32_t;

constexpr std::size_t kHeaderBytes = sizeof(Length) + kTagBytes;

// What stands before the bytes that a tag covers. That of a header covers nothing else, that
// of a payload at least a byte more, so that neither passes for the other.
struct Context {
  std::uint64_t number;
  std::uint32_t length;

  std::array<std::byte, 12> bytes() const noexcept {
    std::array<std::byte, 12> bytes;
    std::memcpy(bytes.data(), &number, sizeof number);
    std::memcpy(bytes.data() + sizeof number, &length, sizeof length);
    return bytes;
  }
};

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

void append_tag(std::string& stream, const Tag& tag) {
  stream.append(reinterpret_cast<const char*>(tag.data()), tag.size());
}

}  // namespace

void SignedFrameWriter::append(std::string& stream, std::string_view payload) {
  const auto length = static_cast<Length>(payload.size());
  const auto context = Context{count_++, length}.bytes();
  stream.append(reinterpret_cast<const char*>(&length), sizeof length);
  append_tag(stream, mac_.of(context));
  if (payload.empty()) return;
  stream.append(payload);
  append_tag(stream, mac_.of(context, bytes_of(payload)));
}

void SignedFrameReader::check(std::string_view covered, std::string_view tag) const {
  const auto context = Context{count_, *length_}.bytes();
  if (is_same(mac_.of(context, bytes_of(covered)), bytes_of(tag).first<kTagBytes>())) return;
  throw Failure(ErrorCode::kPeerLost,
                "message " + std::to_string(count_) + " of the connection fails its MAC");
}

bool SignedFrameReader::next(std::string& payload) {
  const std::string_view unread = received_.unread();
  if (unread.size() < kHeaderBytes) return false;
  if (!length_) {
    // Before the length is believed: waiting for bytes that are never sent has no end.
    length_.emplace();
    std::memcpy(&*length_, unread.data(), sizeof(Length));
    try {
      check({}, unread.substr(sizeof(Length), kTagBytes));
      if (*length_ > kFrameBytesMax) throw Failure(ErrorCode::kPeerLost, "a message is too long");
    } catch (const Failure&) {
      length_.reset();
      throw;
    }
  }
  const std::size_t length = *length_;
  const std::size_t whole = kHeaderBytes + length + (length > 0 ? kTagBytes : 0);
  if (unread.size() < whole) return false;
  if (length > 0) {
    const std::string_view covered = unread.substr(kHeaderBytes, length);
    check(covered, unread.substr(kHeaderBytes + length, kTagBytes));
  }
  payload.assign(unread.substr(kHeaderBytes, length));
  received_.consume(whole);
  length_.reset();
  ++count_;
  return true;
}

}  // namespace polyhvd
