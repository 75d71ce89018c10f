// Bytes of the control plane. Pure. Every length read is checked against the
// bytes at hand and against a bound, so a hostile frame costs no memory.
//
// Within a host a frame is [u32 length][u32 crc32c of the payload][u32 crc32c of these eight bytes
// and the frame's number in its stream][payload], little endian. One with an empty
// payload carries nothing but its number: a heartbeat. Between hosts: signed_framing.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "control/inquiry.h"
#include "control/request.h"
#include "control/tuning.h"

namespace polyhvd {

inline constexpr std::size_t kFrameHeaderBytes = 12;
inline constexpr std::size_t kFrameBytesMax = 64u << 20;
inline constexpr int kTensorRankMax = 64;
// Bound on the product of a shape's dimensions (zeros left out), so that sizes
// in bytes never overflow.
inline constexpr std::int64_t kElementsMax = std::int64_t{1} << 59;

// kAbort ends everything at once; kFarewell says that the sender has left in good
// order: what was agreed before it still runs.
// An inquiry goes down the tree, answers go up. A tuning goes down, and holds for the
// decisions that follow.
enum class MessageType : std::uint8_t {
  kReport = 1,
  kDecision = 2,
  kAbort = 3,
  kFarewell = 4,
  kInquiry = 5,
  kAnswer = 6,
  kTuning = 7,
};

// Each appends one whole payload (a type byte, then the fields) to `out`.
void encode(const Report& report, std::string& out);
void encode(const Decision& decision, std::string& out);
void encode(const Error& abort_reason, std::string& out);
void encode_farewell(const Departure& departure, std::string& out);
void encode(const Inquiry& inquiry, std::string& out);
void encode(const Answer& answer, std::string& out);
void encode(const Tuning& tuning, std::string& out);

// Type of a payload; throws Failure(kInternal) when it is empty or unknown.
MessageType type_of(std::string_view payload);

// Each throws Failure(kInternal) with the offset and the reason on bad bytes.
Report decode_report(std::string_view payload);
Decision decode_decision(std::string_view payload);
Error decode_abort(std::string_view payload);
Departure decode_farewell(std::string_view payload);
Inquiry decode_inquiry(std::string_view payload);
Answer decode_answer(std::string_view payload);
Tuning decode_tuning(std::string_view payload);

}  // namespace polyhvd
