#include "tcp/message.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "control/crc32c.h"
#include "control/wire.h"

namespace polyhvd::tcp {
namespace {

constexpr std::uint32_t kMagic = 0x32564850;  // "PHV2"

std::uint32_t crc_of(const MessageHeader& header) noexcept {
  return crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(MessageHeader, crc)));
}

// Of a last message: `reason` follows its kind and number.
Tag tag_of(MessageKind kind, std::uint32_t number, std::span<const std::byte> reason,
           const Mac& mac) noexcept {
  const std::uint32_t words[] = {static_cast<std::uint32_t>(kind), number};
  return mac.of(std::as_bytes(std::span(words)), reason);
}

// Half a tag is what a header has room for; a wrong one ends the connection, so that a
// sender has one try only.
std::uint64_t word_of_goodbye(std::uint32_t number, const Mac& mac) noexcept {
  std::uint64_t word;
  std::memcpy(&word, tag_of(MessageKind::kGoodbye, number, {}, mac).data(), sizeof word);
  return word;
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

MessageHeader make_goodbye(std::uint32_t number, const Mac& mac) noexcept {
  return make_header(MessageKind::kGoodbye, number, word_of_goodbye(number, mac));
}

std::string fault_of(const MessageHeader& header, std::uint32_t number, const Mac& mac) {
  if (header.magic != kMagic || header.crc != crc_of(header)) {
    return "there is no header where message " + std::to_string(number) +
           " should begin: bytes were changed, lost or inserted in transit";
  }
  if (header.number != number) {
    return "message " + std::to_string(header.number) + " arrived where message " +
           std::to_string(number) + " was expected: " +
           (static_cast<std::int32_t>(header.number - number) > 0 ? "some were lost"
                                                                  : "one arrived twice") +
           " in transit";
  }
  if (header.kind == MessageKind::kGoodbye && header.bytes != word_of_goodbye(number, mac)) {
    return "a goodbye fails its MAC: it was inserted in transit";
  }
  return "";
}

std::string encode_failure(const Error& error, std::uint32_t number, const Mac& mac) {
  std::string reason;
  encode(Error{error.code, shortened(error.message, kReasonBytesMax / 2)}, reason);
  append(reason, tag_of(MessageKind::kFailure, number, std::as_bytes(std::span(reason)), mac));
  const MessageHeader header = make_header(MessageKind::kFailure, number, reason.size());
  std::string message;
  append(message, header);
  message += reason;
  append(message, crc32c(std::as_bytes(std::span(reason)), header.crc));
  return message;
}

std::optional<Error> decode_failure(std::span<const std::byte> bytes, std::uint32_t number,
                                    const Mac& mac) {
  if (bytes.size() < kTagBytes) return std::nullopt;
  const auto reason = bytes.first(bytes.size() - kTagBytes);
  const Tag tag = tag_of(MessageKind::kFailure, number, reason, mac);
  if (!is_same(tag, bytes.last<kTagBytes>())) return std::nullopt;
  return decode_abort({reinterpret_cast<const char*>(reason.data()), reason.size()});
}

}  // namespace polyhvd::tcp
