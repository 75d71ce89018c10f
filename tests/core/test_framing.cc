#include <doctest/doctest.h>

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "control/error.h"
#include "control/framing.h"
#include "control/wire.h"

namespace polyhvd {
namespace {

// What a reader makes of a stream that comes in pieces; nothing once it has refused it.
std::optional<std::vector<std::string>> payloads_of(const std::string& stream, std::size_t piece) {
  FrameReader reader;
  std::vector<std::string> payloads;
  std::string payload;
  try {
    for (std::size_t at = 0; at < stream.size(); at += piece) {
      const std::string part = stream.substr(at, piece);
      reader.append(reinterpret_cast<const std::byte*>(part.data()), part.size());
      while (reader.next(payload)) payloads.push_back(payload);
    }
  } catch (const Failure& failure) {
    CHECK(failure.error().code == ErrorCode::kPeerLost);
    return std::nullopt;
  }
  return payloads;
}

std::string stream_of(const std::vector<std::string>& payloads) {
  std::string stream;
  FrameWriter writer;
  for (const std::string& payload : payloads) writer.append(stream, payload);
  return stream;
}

TEST_CASE("frames come back whole, however the stream is cut") {
  const std::vector<std::string> payloads{"", "x", std::string(1000, '\xff'), "", "last"};
  const std::string stream = stream_of(payloads);
  for (const std::size_t piece : {std::size_t{1}, std::size_t{7}, stream.size()}) {
    CHECK(payloads_of(stream, piece) == payloads);
  }
}

TEST_CASE("a bit that is turned over anywhere in a frame is found once the frame is there") {
  const std::string stream = stream_of({"a report"});
  for (std::size_t bit = 0; bit < 8 * stream.size(); ++bit) {
    std::string garbled = stream;
    garbled[bit / 8] = static_cast<char>(garbled[bit / 8] ^ (1 << bit % 8));
    CAPTURE(bit);
    CHECK_FALSE(payloads_of(garbled, stream.size()));
  }
}

TEST_CASE("a garbled length is refused by the header alone: its bytes may never come") {
  std::string header = stream_of({std::string(100, 'p')}).substr(0, kFrameHeaderBytes);
  CHECK(payloads_of(header, header.size())->empty());
  header[1] = 1;  // 356 bytes
  CHECK_FALSE(payloads_of(header, header.size()));
}

TEST_CASE("bytes put into a stream or taken out of it are found at the next frame") {
  const std::string first = stream_of({"first"});
  const std::string second = stream_of({"first", "second"}).substr(first.size());
  CHECK(payloads_of(first + second, 1));
  CHECK_FALSE(payloads_of(first + "?" + second, 1));
  CHECK_FALSE(payloads_of(first.substr(0, first.size() - 1) + second, 1));
}

TEST_CASE("a whole frame that was lost or comes twice is found at the next frame") {
  const std::string one = stream_of({"same"}), three = stream_of({"same", "same", "same"});
  CHECK_FALSE(payloads_of(three.substr(0, one.size()) + three.substr(2 * one.size()), 1));
  CHECK_FALSE(payloads_of(one + three, 1));
}

}  // namespace
}  // namespace polyhvd
