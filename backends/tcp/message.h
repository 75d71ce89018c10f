// One message on a data connection: a header of 24 bytes, the bytes, and a tail of 4.
// Every message has a number, so that one which was lost, came twice or was cut short
// is noticed at once, and never taken for another's bytes. Bytes of tensors carry no MAC;
// the last message, with the reason why nothing follows, does. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "control/error.h"
#include "control/mac.h"

namespace polyhvd::tcp {

enum class MessageKind : std::uint32_t {
  kData = 1,
  kSummedData = 2,  // the tail covers the bytes
  kGoodbye = 3,     // the sender has left in good order; nothing follows, and no tail
  kFailure = 4,     // the bytes are the reason why the sender's engine has ended; nothing follows
};

// Little endian, as it lies.
struct MessageHeader {
  std::uint32_t magic = 0;
  std::uint32_t number = 0;  // of the message in its direction, from 0
  std::uint64_t bytes = 0;   // that follow; a goodbye has its MAC here
  MessageKind kind = MessageKind::kData;
  std::uint32_t crc = 0;  // CRC-32C of what stands before
};
static_assert(sizeof(MessageHeader) == 24);

// The header's CRC-32C, gone on with over the bytes where they are summed: so it
// belongs only to this message.
using MessageTail = std::uint32_t;

// Bytes that a reason for the end may have on its way to a peer.
inline constexpr std::size_t kReasonBytesMax = 4 << 10;

MessageHeader make_header(MessageKind kind, std::uint32_t number, std::uint64_t bytes) noexcept;

MessageHeader make_goodbye(std::uint32_t number, const Mac& mac) noexcept;

// What is wrong with a header that is to be message `number`; empty: nothing. One of
// these connections carries nothing else, so each is a fault of the connection.
std::string fault_of(const MessageHeader& header, std::uint32_t number, const Mac& mac);

// A whole message of kind kFailure.
std::string encode_failure(const Error& error, std::uint32_t number, const Mac& mac);
// Its bytes, without header and tail; nothing where their MAC is not right.
std::optional<Error> decode_failure(std::span<const std::byte> bytes, std::uint32_t number,
                                    const Mac& mac);

}  // namespace polyhvd::tcp
