// What TCP connections make of streams that were damaged on the way. The wire is a
// socket pair whose other end is held by the test.
#include <doctest/doctest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "tcp/message.h"
#include "tcp/tcp_channel.h"
#include "tcp/tcp_transport.h"

namespace polyhvd::tcp {
namespace {

using Clock = std::chrono::steady_clock;
using Stream = std::string;

constexpr std::size_t kFrame = sizeof(MessageHeader) + sizeof(MessageTail);

// The far end of a connection; the near one belongs to whom it was given.
class Wire {
 public:
  Wire() { REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds_) == 0); }
  ~Wire() { end(); }
  Wire(const Wire&) = delete;
  Wire& operator=(const Wire&) = delete;

  int near() const { return fds_[0]; }
  void put(std::string_view bytes) {
    REQUIRE(send(fds_[1], bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
            static_cast<ssize_t>(bytes.size()));
  }
  Stream take() {
    char bytes[64 << 10];
    const ssize_t n = recv(fds_[1], bytes, sizeof bytes, MSG_DONTWAIT);
    return {bytes, static_cast<std::size_t>(std::max<ssize_t>(n, 0))};
  }
  void end() {
    if (fds_[1] >= 0) close(std::exchange(fds_[1], -1));
  }

 private:
  int fds_[2] = {-1, -1};
};

Key key_of(int number) {
  Key key{};
  key[0] = static_cast<std::byte>(number);
  return key;
}

// Rank 0 with one connection, to rank 1. Its keys are the same in both directions, so that
// one's words can be another's.
struct Near {
  explicit Near(Wire& wire, bool checksums = false, int key = 0)
      : transport({{1, wire.near()}}, {{1, {key_of(key), key_of(key)}}}, parking,
                  {0, checksums, [](int rank) { return "rank " + std::to_string(rank); },
                   [](int rank) {
                     throw Failure(ErrorCode::kPeerLost, std::to_string(rank) + " was lost");
                   }}) {
    parking.set_on_slow([] {});
  }
  void send(std::string_view bytes) {
    transport.send(1, std::as_bytes(std::span(bytes)), Clock::now() + std::chrono::seconds(30));
  }
  std::string receive(std::size_t bytes) {
    std::string into(bytes, '?');
    transport.recv(1, std::as_writable_bytes(std::span(into)),
                   Clock::now() + std::chrono::seconds(30));
    return into;
  }

  Parking parking;
  TcpTransport transport;
};

// What a rank puts on the wire, message by message.
std::vector<Stream> sent(const std::vector<std::string>& messages, bool checksums) {
  Wire wire;
  Near near(wire, checksums);
  std::vector<Stream> streams;
  for (const std::string& message : messages) {
    near.send(message);
    streams.push_back(wire.take());
  }
  return streams;
}

std::optional<Error> error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Failure& failure) {
    return failure.error();
  }
  return std::nullopt;
}

// How it ends when a rank takes messages of these lengths from a stream that then ends.
std::optional<Error> taking(const Stream& stream, const std::vector<std::string>& expected) {
  Wire wire;
  Near near(wire);
  wire.put(stream);
  wire.end();
  return error_of([&] {
    for (const std::string& message : expected) {
      const std::string received =
          near.receive(message.size());  // outside of CHECK, as it may throw
      CHECK(received == message);
    }
  });
}

bool is_lost(const std::optional<Error>& error) {
  return error && error->code == ErrorCode::kPeerLost &&
         error->message.find('1') != std::string::npos;
}

bool mentions(const std::optional<Error>& error, const char* part) {
  return error && error->message.find(part) != std::string::npos;
}

TEST_CASE("messages come back whole, with checksums and without") {
  const std::vector<std::string> messages{"x", std::string(1000, 'y'), std::string(7, '\0')};
  for (const bool checksums : {false, true}) {
    Stream all;
    for (const Stream& stream : sent(messages, checksums)) all += stream;
    CHECK(all.size() == 1008 + 3 * kFrame);
    CHECK_FALSE(taking(all, messages));
  }
}

TEST_CASE("a bit that is turned over in a message with a checksum is always found") {
  const std::vector<std::string> messages{"some bytes of a tensor"};
  const Stream stream = sent(messages, true)[0];
  for (std::size_t bit = 0; bit < 8 * stream.size(); ++bit) {
    Stream garbled = stream;
    garbled[bit / 8] = static_cast<char>(garbled[bit / 8] ^ (1 << bit % 8));
    CAPTURE(bit);
    CHECK(is_lost(taking(garbled, {std::string(messages[0].size(), '?')})));
  }
}

TEST_CASE("without a checksum one in header or tail is found") {
  const Stream stream = sent({"bytes"}, false)[0];
  for (std::size_t bit = 0; bit < 8 * stream.size(); ++bit) {
    const std::size_t byte = bit / 8;
    if (byte >= sizeof(MessageHeader) && byte < sizeof(MessageHeader) + 5) continue;
    Stream garbled = stream;
    garbled[byte] = static_cast<char>(garbled[byte] ^ (1 << bit % 8));
    CAPTURE(bit);
    CHECK(is_lost(taking(garbled, {"bytes"})));
  }
}

TEST_CASE("a message that was lost, came twice or overtook another is an error by its number") {
  const auto m = sent({"same", "same", "same"}, false);
  CHECK_FALSE(taking(m[0] + m[1] + m[2], {"same", "same", "same"}));
  CHECK(mentions(taking(m[1] + m[2], {"same"}), "some were lost"));
  CHECK(mentions(taking(m[0] + m[0], {"same", "same"}), "one arrived twice"));
  CHECK(
      mentions(taking(m[0] + m[2] + m[1], {"same", "same"}), "message 2 arrived where message 1"));
}

TEST_CASE("a message that was cut short is found by its tail, not filled up with the next one") {
  const std::string body(100, 'b');
  for (const bool checksums : {false, true}) {
    const auto m = sent({body, body}, checksums);
    for (std::size_t lost = 1; lost <= body.size(); lost += 9) {
      const std::size_t keep = sizeof(MessageHeader) + body.size() - lost;
      const Stream cut = m[0].substr(0, keep) + m[0].substr(keep + lost) + m[1];
      CAPTURE(lost);
      CHECK(is_lost(taking(cut, {body})));
    }
    CHECK(is_lost(taking(m[0].substr(0, m[0].size() / 2), {body})));  // and then the end
    CHECK(is_lost(taking(m[0].substr(0, 30) + "?" + m[0].substr(30) + m[1], {body})));
  }
}

TEST_CASE("bytes that came with a checksum are counted") {
  const auto m = sent({"12345", "678"}, true);
  Wire wire;
  Near near(wire);
  wire.put(m[0] + m[1]);
  (void)near.receive(5);
  (void)near.receive(3);
  CHECK(near.transport.bytes_checked() == 8);
}

TEST_CASE("a large message is summed in pieces as it is sent and received") {
  const std::string large(3'000'001, 'L');
  Wire out, in;
  Near from(out, true), to(in);
  std::thread pump([&] {
    std::size_t left = large.size() + kFrame;
    while (left > 0) {
      const Stream bytes = out.take();
      in.put(bytes);
      left -= bytes.size();
    }
  });
  std::thread sender([&] { from.send(large); });
  const bool whole = to.receive(large.size()) == large;
  sender.join();
  pump.join();
  CHECK(whole);
  CHECK(to.transport.bytes_checked() == large.size());
}

// ---- last words -----------------------------------------------------------------

Stream last_words(const std::function<void(TcpTransport&)>& say, int key = 0) {
  Wire wire;
  Near near(wire, false, key);
  say(near.transport);
  return wire.take();
}

TEST_CASE("why a peer's engine has ended is heard in a transfer, idle, and when sending to it") {
  const Stream words = last_words([](TcpTransport& transport) {
    transport.say_failure({ErrorCode::kTimeout, "its disk is full"});
  });
  const auto check = [](const std::optional<Error>& error) {
    REQUIRE(error);
    CHECK(error->code == ErrorCode::kTimeout);
    CHECK(error->message == "its disk is full");
  };
  check(taking(words, {"expected"}));
  check(taking(words, {std::string(100'000, 'e')}));
  for (std::size_t bytes = 1; bytes < 64; ++bytes) check(taking(words, {std::string(bytes, 'e')}));
  for (const bool idle : {true, false}) {
    Wire wire;
    Near near(wire);
    wire.put(words);
    wire.end();
    check(error_of([&] { idle ? near.parking.poll_now() : near.send("too late"); }));
  }
}

TEST_CASE("a goodbye ends the transfers that need the peer, and no others") {
  const Stream words = last_words([](TcpTransport& transport) { transport.say_goodbye(); });
  const auto error = taking(words, {"expected"});
  REQUIRE(error);
  CHECK(error->code == ErrorCode::kPeerDeparted);
  Wire wire;
  Near near(wire);
  wire.put(words);
  wire.end();
  CHECK_FALSE(error_of([&] { near.parking.poll_now(); }));
}

TEST_CASE("a peer that closes without last words is lost") {
  Wire wire;
  Near near(wire);
  wire.end();
  CHECK(is_lost(error_of([&] { near.parking.poll_now(); })));
}

TEST_CASE("garbled last words are no last words") {
  Stream words = last_words([](TcpTransport& transport) {
    transport.say_failure({ErrorCode::kTimeout, "its disk is full"});
  });
  words[words.size() - 8] ^= 1;
  Wire wire;
  Near near(wire);
  wire.put(words);
  wire.end();
  CHECK(mentions(error_of([&] { near.parking.poll_now(); }), "corrupted"));
}

TEST_CASE("last words of somebody on the way, who can compute a checksum, are not believed") {
  const std::function<void(TcpTransport&)> says[] = {
      [](TcpTransport& transport) { transport.say_goodbye(); },
      [](TcpTransport& transport) { transport.say_failure({ErrorCode::kTimeout, "a story"}); }};
  for (const auto& say : says) {
    const Stream words = last_words(say, 1);
    CHECK(mentions(taking(words, {"expected"}), "MAC"));
    Wire wire;
    Near near(wire);
    wire.put(words);
    wire.end();
    const auto error = error_of([&] { near.parking.poll_now(); });
    CHECK(is_lost(error));
    CHECK(mentions(error, "data from rank 1 to rank 0 cannot be trusted"));
  }
}

TEST_CASE("a reason of any length is sent, cut to what a message may have") {
  std::string reason;
  while (reason.size() < 100'000) reason += "grün ";
  const Stream words = last_words(
      [&](TcpTransport& transport) { transport.say_failure({ErrorCode::kTimeout, reason}); });
  const auto error = taking(words, {"expected"});
  REQUIRE(error);
  CHECK(error->code == ErrorCode::kTimeout);
  CHECK(reason.starts_with(error->message));
  CHECK(error->message.size() > 1000);
}

TEST_CASE("who has failed says so once, and then no goodbye") {
  const Stream words = last_words([](TcpTransport& transport) {
    transport.say_failure({ErrorCode::kTimeout, "first"});
    transport.say_goodbye();
  });
  CHECK(words == last_words([](TcpTransport& transport) {
          transport.say_failure({ErrorCode::kTimeout, "first"});
        }));
}

TEST_CASE("a peer that leaves while its last message is being received has lost nothing") {
  const std::string body(1000, 'b');
  Stream stream;
  {
    Wire wire;
    Near leaver(wire);
    leaver.send(body);
    leaver.transport.say_goodbye();
    stream = wire.take();
  }
  Wire wire;
  Near near(wire);
  wire.put(stream.substr(0, 500));
  // In the middle of the wait the rest comes, and the end, and is polled for.
  bool left = false;
  near.parking.set_on_slow([&] {
    if (std::exchange(left, true)) return;
    wire.put(stream.substr(500));
    wire.end();
    near.parking.poll_now();
  });
  std::string received;
  CHECK_FALSE(error_of([&] { received = near.receive(body.size()); }));
  CHECK(received == body);
}

// ---- control --------------------------------------------------------------------

TEST_CASE("a control frame that was lost is noticed by the next heartbeat") {
  Wire out, in;
  Parking parking;
  TcpChannel from(out.near(), {key_of(1), key_of(2)}, {0, 1, "rank 1"}, parking);
  TcpChannel to(in.near(), {key_of(2), key_of(1)}, {1, 0, "rank 0"}, parking);
  std::string payload;
  const auto start = Clock::now();
  from.post("a report");
  in.put(out.take());
  CHECK(to.poll(payload));
  CHECK(payload == "a report");
  from.beat(start + std::chrono::seconds(10));  // it has just spoken
  CHECK(out.take().empty());
  from.beat(start + std::chrono::seconds(12));
  const Stream heartbeat = out.take();
  CHECK_FALSE(heartbeat.empty());
  in.put(heartbeat);
  CHECK_FALSE(to.poll(payload));

  from.post("lost");
  (void)out.take();
  from.beat(start + std::chrono::seconds(14));
  from.beat(start + std::chrono::seconds(16));
  in.put(out.take());
  const auto error = error_of([&] { (void)to.poll(payload); });
  REQUIRE(error);
  CHECK(error->code == ErrorCode::kPeerLost);
  CHECK(mentions(error, "a control message from rank 0 to rank 1 was changed, replayed or lost"));
}

TEST_CASE("a control frame that is replayed, reflected or changed names both ranks") {
  const std::function<Stream(Stream)> attacks[] = {
      [](Stream frame) { return frame + frame; },
      [](Stream frame) { return frame.replace(frame.size() - 20, 1, "?"); }};
  for (const auto& attack : attacks) {
    Wire out, in;
    Parking parking;
    TcpChannel from(out.near(), {key_of(1), key_of(2)}, {0, 1, "rank 1"}, parking);
    TcpChannel to(in.near(), {key_of(2), key_of(1)}, {1, 0, "rank 0"}, parking);
    from.post("a report");
    const Stream frame = out.take();
    in.put(attack(frame));
    std::string payload;
    const auto error = error_of([&] {
      while (to.poll(payload)) {
      }
    });
    CHECK(mentions(error, "from rank 0 to rank 1 was changed, replayed or lost"));
    out.put(frame);  // back to who has sent it
    CHECK(mentions(error_of([&] { (void)from.poll(payload); }), "from rank 1 to rank 0"));
  }
}

}  // namespace
}  // namespace polyhvd::tcp
