#include <doctest/doctest.h>

#include <optional>
#include <string>
#include <vector>

#include "control/error.h"
#include "control/signed_framing.h"
#include "control/wire.h"

namespace polyhvd {
namespace {

using Payloads = std::vector<std::string>;

constexpr std::size_t kHeaderBytes = 4 + kTagBytes;

Key key_of(int number) {
  Key key{};
  key[0] = static_cast<std::byte>(number);
  return key;
}

struct Heard {
  Payloads payloads;
  bool refused = false;
};

// What a reader makes of a stream that comes in pieces.
Heard heard_of(const std::string& stream, std::size_t piece, int key = 1) {
  SignedFrameReader reader(key_of(key));
  Heard heard;
  std::string payload;
  try {
    for (std::size_t at = 0; at < stream.size(); at += piece) {
      const std::string part = stream.substr(at, piece);
      reader.append(reinterpret_cast<const std::byte*>(part.data()), part.size());
      while (reader.next(payload)) heard.payloads.push_back(payload);
    }
  } catch (const Failure& failure) {
    CHECK(failure.error().code == ErrorCode::kPeerLost);
    CHECK_THROWS_AS(reader.next(payload), Failure);  // and never recovers
    heard.refused = true;
  }
  return heard;
}

Payloads frames_of(const Payloads& payloads, int key = 1) {
  SignedFrameWriter writer(key_of(key));
  Payloads frames;
  for (const std::string& payload : payloads) writer.append(frames.emplace_back(), payload);
  return frames;
}

std::string joined(const Payloads& parts) {
  std::string all;
  for (const std::string& part : parts) all += part;
  return all;
}

TEST_CASE("signed frames come back whole, however the stream is cut") {
  const Payloads payloads{"", "x", std::string(1000, '\xff'), "", "last"};
  const std::string stream = joined(frames_of(payloads));
  for (const std::size_t piece : {std::size_t{1}, std::size_t{7}, stream.size()}) {
    const Heard heard = heard_of(stream, piece);
    CHECK_FALSE(heard.refused);
    CHECK(heard.payloads == payloads);
  }
}

TEST_CASE("a bit that is turned over anywhere in a signed frame is found once the frame is there") {
  const std::string stream = joined(frames_of({"a report"}));
  for (std::size_t bit = 0; bit < 8 * stream.size(); ++bit) {
    std::string changed = stream;
    changed[bit / 8] = static_cast<char>(changed[bit / 8] ^ (1 << bit % 8));
    CAPTURE(bit);
    const Heard heard = heard_of(changed, stream.size());
    CHECK(heard.refused);
    CHECK(heard.payloads.empty());
  }
}

TEST_CASE("a changed length is refused by the header alone: its bytes may never come") {
  std::string header = joined(frames_of({std::string(100, 'p')})).substr(0, kHeaderBytes);
  CHECK_FALSE(heard_of(header, header.size()).refused);
  header[1] = 1;  // 356 bytes
  CHECK(heard_of(header, header.size()).refused);
}

TEST_CASE("a length beyond the bound is refused though its sender knows the key") {
  const std::string stream = joined(frames_of({std::string(kFrameBytesMax + 1, 'p')}));
  CHECK(heard_of(stream.substr(0, kHeaderBytes), kHeaderBytes).refused);
}

TEST_CASE("of signed frames that were lost, replayed or put elsewhere none passes for another") {
  const Payloads one = frames_of({"same", "same", "same", ""});
  const Payloads orders[] = {{one[0], one[0]}, {one[1]},         {one[0], one[2]},
                             {one[1], one[0]}, {one[0], one[3]}, {one[3]}};
  for (const Payloads& order : orders) {
    const Heard heard = heard_of(joined(order), 1);
    CHECK(heard.refused);
    CHECK(heard.payloads.size() == (order[0] == one[0] ? 1 : 0));
  }
}

TEST_CASE("header, payload and tag of different frames do not fit together") {
  const Payloads frames = frames_of({"first", "other"});
  const std::string again = joined(frames_of({"other"}));  // with the key, and the number 0
  const std::string mixed = frames[0].substr(0, kHeaderBytes) + frames[1].substr(kHeaderBytes);
  CHECK(heard_of(mixed, mixed.size()).refused);
  CHECK_FALSE(heard_of(again, again.size()).refused);
}

TEST_CASE(
    "frames of another key are refused, also those of the same connection's other direction") {
  const std::string stream = joined(frames_of({"mine"}, 1));
  CHECK(heard_of(stream, stream.size(), 2).refused);
}

}  // namespace
}  // namespace polyhvd
