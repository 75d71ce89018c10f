// What must hold of any bytes whatever.
#include <algorithm>
#include <stdexcept>

#include "control/error.h"
#include "control/framing.h"
#include "control/signed_framing.h"
#include "control/wire.h"
#include "fuzz.h"

// Of AddressSanitizer's runtime; sanitizer/allocator_interface.h, which GCC does not install.
extern "C" int __sanitizer_install_malloc_and_free_hooks(void (*on_malloc)(const volatile void*,
                                                                           std::size_t),
                                                         void (*on_free)(const volatile void*));

namespace polyhvd::fuzz {
namespace {

// The largest growth is that of refusals of no text: 22 bytes become 96.
constexpr std::size_t kGrowthMax = 8;
constexpr std::size_t kErrorBytes = 1024;  // of a Failure's text, and of growing strings

std::size_t allocated = 0;  // the program has one thread

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

std::string encoded_again(const std::string& payload) {
  std::string again;
  switch (type_of(payload)) {
    case MessageType::kReport:
      encode(decode_report(payload), again);
      break;
    case MessageType::kDecision:
      encode(decode_decision(payload), again);
      break;
    case MessageType::kAbort:
      encode(decode_abort(payload), again);
      break;
    case MessageType::kFarewell:
      encode_farewell(decode_farewell(payload), again);
      break;
    case MessageType::kInquiry:
      encode(decode_inquiry(payload), again);
      break;
    case MessageType::kAnswer:
      encode(decode_answer(payload), again);
      break;
    case MessageType::kTuning:
      encode(decode_tuning(payload), again);
      break;
  }
  return again;
}

void damage(std::string& stream, Random& random) {
  const std::size_t at = below(random, stream.size());
  switch (below(random, 4)) {
    case 0:
      return;  // none
    case 1:    // fewer bits than a checksum can miss
      for (std::size_t flips = 1 + below(random, 3); flips > 0; --flips) {
        char& byte = stream[below(random, stream.size())];
        byte = static_cast<char>(byte ^ (1 << below(random, 8)));
      }
      return;
    case 2:
      stream.erase(at, 1 + below(random, 16));
      return;
    default:
      stream.insert(at, std::string(1 + below(random, 16), static_cast<char>(random())));
  }
}

}  // namespace

void begin_counting() {
  __sanitizer_install_malloc_and_free_hooks(
      [](const volatile void*, std::size_t bytes) { allocated += bytes; },
      [](const volatile void*) {});
}

void check_payload(const std::string& payload) {
  const std::size_t before = allocated;
  std::string again;
  try {
    again = encoded_again(payload);
  } catch (const Failure& failure) {
    expect(failure.error().code == ErrorCode::kInternal, "refused with another code");
    again = payload;
  }
  const std::size_t cost = allocated - before;
  expect(again == payload, "what was read is written as other bytes");
  // Once for what is read, and once for the strings that are written and compared.
  const std::size_t most = (kGrowthMax + 4) * payload.size() + kErrorBytes;
  expect(cost <= most, std::to_string(payload.size()) + " bytes cost " + std::to_string(cost));
}

namespace {

template <class Writer, class Reader>
void check_frames(Writer writer, Reader reader, std::span<const std::string> payloads,
                  Random& random) {
  std::string intact;
  for (const std::string& payload : payloads) writer.append(intact, payload);
  std::string stream = intact;
  damage(stream, random);
  std::string payload;
  std::size_t out = 0;
  try {
    for (std::size_t at = 0; at < stream.size();) {
      const std::size_t count = std::min(stream.size() - at, 1 + below(random, 200));
      reader.append(reinterpret_cast<const std::byte*>(stream.data()) + at, count);
      at += count;
      while (reader.next(payload)) {
        expect(out < payloads.size() && payload == payloads[out], "a frame that nobody sent");
        ++out;
      }
    }
  } catch (const Failure& failure) {
    expect(failure.error().code == ErrorCode::kPeerLost, "refused with another code");
    expect(stream != intact, "refused although nothing was damaged");
    return;
  }
  expect(stream != intact || out == payloads.size(), "frames are missing");
}

}  // namespace

void check_stream(std::span<const std::string> payloads, Random& random) {
  check_frames(FrameWriter(), FrameReader(), payloads, random);
  const Key key{std::byte{1}, std::byte{2}};
  check_frames(SignedFrameWriter(key), SignedFrameReader(key), payloads, random);
}

}  // namespace polyhvd::fuzz
