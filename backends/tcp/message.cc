#include "tcp/message.h"

#include <algorithm>
#include <cstddef>

#include "control/crc32c.h"
#include "control/wire.h"

namespace polyhvd::tcp {
namespace {

constexpr std::uint32_t kMagic = 0x32564850;  // "PHV2"

std::uint32_t crc_of(const MessageHeader& header) noexcept {
  return crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(MessageHeader, crc)));
}

// Cut where a character of UTF-8 ends.
std::string shortened(const std::string& text, std::size_t bytes_max) {
  std::size_t n = std::min(text.size(), bytes_max);
  while (n > 0 && n < text.size() && (text[n] & 0xc0) == 0x80) --n;
  return text.substr(0, n);
}

template <class T>
void append(std::string& out, const T& value) {
  out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace

MessageHeader make_header(MessageKind kind, std::uint32_t number, std::uint64_t bytes) noexcept {
  MessageHeader header{kMagic, number, bytes, kind, 0};
  header.crc = crc_of(header);
  return header;
}

std::string fault_of(const MessageHeader& header, std::uint32_t number) {
  if (header.magic != kMagic || header.crc != crc_of(header)) {
    return "where message " + std::to_string(number) +
           " should begin is none: bytes were changed, lost or put in on the way";
  }
  if (header.number != number) {
    return "message " + std::to_string(header.number) + " came where message " +
           std::to_string(number) + " was due: " +
           (static_cast<std::int32_t>(header.number - number) > 0 ? "some were lost"
                                                                  : "one came twice") +
           " on the way";
  }
  return "";
}

std::string encode_failure(const Error& error, std::uint32_t number) {
  std::string reason;
  encode(Error{error.code, shortened(error.message, kReasonBytesMax / 2)}, reason);
  const MessageHeader header = make_header(MessageKind::kFailure, number, reason.size());
  std::string message;
  append(message, header);
  message += reason;
  append(message, crc32c(std::as_bytes(std::span(reason)), header.crc));
  return message;
}

Error decode_failure(std::span<const std::byte> bytes) {
  return decode_abort({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

}  // namespace polyhvd::tcp
