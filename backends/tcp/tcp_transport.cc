#include "tcp/tcp_transport.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <tuple>
#include <utility>

#include "control/crc32c.h"
#include "tcp/message.h"

namespace polyhvd::tcp {
namespace {

constexpr std::size_t kHeaderBytes = sizeof(MessageHeader);
// Summed before they are sent, while they are in cache.
constexpr std::size_t kSummedAtOnce = 256 << 10;

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

// What one system call moves: parts of a message without the bytes that are done.
class Parts {
 public:
  explicit Parts(std::size_t done) : done_(done) {}
  void add(const void* data, std::size_t bytes) {
    const std::size_t skipped = std::min(done_, bytes);
    done_ -= skipped;
    if (skipped == bytes) return;
    parts_[count_++] = {static_cast<char*>(const_cast<void*>(data)) + skipped, bytes - skipped};
  }
  msghdr message() {
    msghdr message{};
    message.msg_iov = parts_;
    message.msg_iovlen = count_;
    return message;
  }

 private:
  std::size_t done_;
  iovec parts_[3];
  std::size_t count_ = 0;
};

}  // namespace

// A message that is sent, as far as it has got.
struct TcpTransport::Outgoing {
  const TcpTransport* transport;
  int rank;
  Connection* connection;
  ConstBytes body;
  MessageHeader header{};
  MessageTail tail = 0;
  std::size_t summed = 0;  // of the body; all of it where it is not summed
  std::size_t done = 0;

  Outgoing(const TcpTransport& t, int to, Connection* c, ConstBytes bytes)
      : transport(&t), rank(to), connection(c), body(bytes) {
    const bool sums = t.options_.checksums;
    const auto number = connection->sent + static_cast<std::uint32_t>(connection->posted.size());
    header = make_header(sums ? MessageKind::kSummedData : MessageKind::kData, number, body.size());
    tail = header.crc;
    if (!sums) summed = body.size();
  }

  std::size_t total() const { return kHeaderBytes + body.size() + sizeof tail; }
  bool finished() const { return done == total(); }

  // Sends what fits; true when all is sent.
  bool advance() {
    while (!finished()) {
      if (summed < body.size() && done >= kHeaderBytes + summed) sum_ahead();
      if (summed == 0 && !body.empty()) sum_ahead();
      Parts parts(done);
      parts.add(&header, sizeof header);
      parts.add(body.data(), summed);
      if (summed == body.size()) parts.add(&tail, sizeof tail);
      const msghdr message = parts.message();
      const ssize_t n = sendmsg(connection->socket.fd(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n > 0) {
        done += static_cast<std::size_t>(n);
        transport->parking_.note_move();
        connection->sending = done < total();
        connection->sent += done == total();
      } else if (n < 0 && errno == EINTR) {
        continue;
      } else if (n < 0 && would_block()) {
        return false;
      } else {
        transport->lost(rank, *connection);
      }
    }
    return true;
  }

  void sum_ahead() {
    const ConstBytes piece = body.subspan(summed, std::min(kSummedAtOnce, body.size() - summed));
    tail = crc32c(piece, tail);
    summed += piece.size();
  }
};

// The receiving half.
struct TcpTransport::Incoming {
  const TcpTransport& transport;
  int rank;
  Connection* connection;  // null: nothing to receive
  Bytes body;
  MessageHeader header{};
  MessageTail tail = 0;
  std::uint32_t sum = 0;
  std::string reason{};  // takes the place of the body when the peer's engine has ended
  std::size_t done = 0;

  int fd() const { return connection == nullptr ? -1 : connection->socket.fd(); }
  std::size_t total() const { return kHeaderBytes + body.size() + sizeof tail; }
  bool finished() const { return connection == nullptr || done == total(); }
  bool is_summed() const { return header.kind != MessageKind::kData; }

  bool advance() {
    while (!finished()) {
      // As if it were what is expected: nothing follows a message that is not.
      Parts parts(done);
      parts.add(&header, sizeof header);
      parts.add(body.data(), body.size());
      parts.add(&tail, sizeof tail);
      msghdr message = parts.message();
      const ssize_t n = recvmsg(fd(), &message, MSG_DONTWAIT);
      if (n > 0) {
        take(static_cast<std::size_t>(n));
        transport.parking_.note_move();
      } else if (n < 0 && errno == EINTR) {
        continue;
      } else if (n < 0 && would_block()) {
        return false;
      } else {
        transport.lost(rank, *connection);
      }
    }
    return true;
  }

  void take(std::size_t bytes) {
    const std::size_t before = done;
    done += bytes;
    connection->receiving = true;
    if (done < kHeaderBytes) return;
    if (before < kHeaderBytes) check_header();
    if (is_summed()) {
      const std::size_t from = std::min(std::max(before, kHeaderBytes) - kHeaderBytes, body.size());
      const std::size_t to = std::min(done - kHeaderBytes, body.size());
      sum = crc32c(body.subspan(from, to - from), sum);
    }
    if (done == total()) check_tail();
  }

  void check_header() {
    if (const std::string fault = fault_of(header, connection->received, connection->theirs);
        !fault.empty()) {
      transport.distrust(rank, fault);
    }
    sum = header.crc;
    switch (header.kind) {
      case MessageKind::kGoodbye:
        transport.departed(rank);
      case MessageKind::kFailure:
        return expect_reason();
      default:
        break;
    }
    if (header.bytes == body.size()) return;
    throw Failure(ErrorCode::kInternal, transport.options_.described(rank) + " sent rank " +
                                            std::to_string(transport.options_.rank) + " " +
                                            std::to_string(header.bytes) + " bytes where " +
                                            std::to_string(body.size()) + " were agreed");
  }

  // What has come of it lies where the body and the tail were to be.
  void expect_reason() {
    const auto* const end = reinterpret_cast<const char*>(&tail);
    const std::size_t come = done - kHeaderBytes;
    std::string early(reinterpret_cast<const char*>(body.data()), std::min(come, body.size()));
    early.append(end, come - early.size());
    reason.resize(std::min<std::size_t>(header.bytes, kReasonBytesMax));
    body = std::as_writable_bytes(std::span(reason));
    if (early.size() > body.size() + sizeof tail) {
      transport.distrust(rank, "more bytes follow its last message");
    }
    const std::size_t in_body = early.copy(reason.data(), reason.size());
    std::memcpy(&tail, early.data() + in_body, early.size() - in_body);
  }

  void check_tail() {
    if (tail != sum) {
      transport.distrust(rank, "the bytes of message " + std::to_string(header.number) +
                                   (is_summed() ? " fail their checksum" : " do not end with it") +
                                   ": they were changed, lost or inserted in transit");
    }
    if (header.kind == MessageKind::kFailure) transport.end_for(rank, *connection, body);
    connection->receiving = false;
    ++connection->received;
  }
};

TcpTransport::TcpTransport(const std::map<int, int>& fds, const std::map<int, SessionKeys>& keys,
                           Parking& parking, Options options)
    : parking_(parking), options_(std::move(options)) {
  for (const auto& [rank, fd] : fds) {
    connections_.emplace(std::piecewise_construct, std::forward_as_tuple(rank),
                         std::forward_as_tuple(fd, keys.at(rank)));
    // Not POLLIN: a fast peer may send the next operation's data early.
    parking_.watch(fd, POLLRDHUP, [this, rank = rank](short revents) {
      if ((revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) on_close(rank);
    });
  }
}

TcpTransport::~TcpTransport() {
  for (const auto& [rank, connection] : connections_) parking_.unwatch(connection.socket.fd());
}

TcpTransport::Connection& TcpTransport::connection_to(int rank) {
  const auto it = connections_.find(rank);
  if (it == connections_.end()) {
    throw Failure(ErrorCode::kInternal, "no data connection to rank " + std::to_string(rank));
  }
  return it->second;
}

TcpTransport::Connection::Connection(int fd, const SessionKeys& keys)
    : socket(fd), own(keys.send), theirs(keys.receive) {}
TcpTransport::Connection::Connection(Connection&&) noexcept = default;
TcpTransport::Connection::~Connection() = default;

// What to sleep for in one wait; back to idle whatever happens.
class TcpTransport::Interest {
 public:
  Interest(TcpTransport& transport, int receiving_fd)
      : transport_(transport), parking_(transport.parking_), receiving_fd_(receiving_fd) {
    if (receiving_fd >= 0) add(receiving_fd, POLLIN);
    for (const Connection* connection : transport.posting_) add(connection->socket.fd(), POLLOUT);
    transport.interest_ = this;
  }
  ~Interest() {
    transport_.interest_ = nullptr;
    for (const auto& [fd, events] : events_) parking_.set_events(fd, 0);
  }
  Interest(const Interest&) = delete;
  Interest& operator=(const Interest&) = delete;

  void end_sending(int fd) {
    if (const auto it = events_.find(fd); it != events_.end()) {
      it->second = static_cast<short>(it->second & ~POLLOUT);
      parking_.set_events(fd, fd == receiving_fd_ ? it->second : short{0});
    }
  }

 private:
  void add(int fd, short events) {
    short& all = events_[fd];
    all = static_cast<short>(all | events | POLLRDHUP);
    parking_.set_events(fd, all);
  }

  TcpTransport& transport_;
  Parking& parking_;
  const int receiving_fd_;
  std::map<int, short> events_;
};

void TcpTransport::post(int to, ConstBytes out) {
  Connection& connection = connection_to(to);
  if (connection.posted.empty()) posting_.push_back(&connection);
  connection.posted.emplace_back(*this, to, &connection, out);
  (void)advance_posted();
}

// Sends what fits; true when nothing is left.
bool TcpTransport::advance_posted() {
  std::erase_if(posting_, [this](Connection* connection) {
    auto& posted = connection->posted;
    while (!posted.empty() && posted.front().advance()) {
      sent_.fetch_add(posted.front().body.size(), std::memory_order_relaxed);
      posted.erase(posted.begin());
    }
    if (posted.empty() && interest_ != nullptr) interest_->end_sending(connection->socket.fd());
    return posted.empty();
  });
  return posting_.empty();
}

void TcpTransport::settle(std::size_t most, Deadline deadline) {
  const auto few = [&] {
    return std::ranges::all_of(posting_,
                               [most](const Connection* c) { return c->posted.size() <= most; });
  };
  Incoming nothing{*this, -1, nullptr, {}};
  await(nothing, few, deadline);
}

void TcpTransport::exchange(int to, ConstBytes out, int from, Bytes in, Deadline deadline) {
  Connection* const sending = out.empty() ? nullptr : &connection_to(to);
  if (sending != nullptr) post(to, out);
  Incoming receiving{*this, from, in.empty() ? nullptr : &connection_to(from), in};
  await(receiving, [&] { return sending == nullptr || sending->posted.empty(); }, deadline);
  received_.fetch_add(in.size(), std::memory_order_relaxed);
  if (!in.empty() && receiving.is_summed()) {
    checked_.fetch_add(in.size(), std::memory_order_relaxed);
  }
}

// Returns when the message is received and `sent` holds. Everything that was posted moves on.
void TcpTransport::await(Incoming& receiving, const std::function<bool()>& sent,
                         Deadline deadline) {
  const auto advance = [&] {
    (void)advance_posted();
    return receiving.advance() && sent();
  };
  try {
    if (advance()) return;
    const int slow = sent() ? receiving.rank : posting_[0]->posted[0].rank;
    const Parking::WaitFor wait(parking_, slow);
    Interest interest(*this, receiving.fd());
    parking_.await(advance, deadline);
  } catch (const Failure& failure) {
    const int slow = sent() ? receiving.rank : posting_[0]->posted[0].rank;
    // What was not sent is the caller's memory.
    for (Connection* connection : posting_) connection->posted.clear();
    posting_.clear();
    // Not what a peer has sent: its engine may have ended over its own timeout.
    if (failure.error().code != ErrorCode::kTimeout || Parking::Clock::now() < deadline) throw;
    throw Failure(ErrorCode::kTimeout, options_.described(slow) +
                                           " did not take part in an agreed transfer in time; it "
                                           "may be suspended or disconnected");
  }
}

// The other end sends nothing more. What it sent before stays readable, and a transfer
// that wants more than that fails by itself.
void TcpTransport::on_close(int rank) {
  const Connection& connection = connections_.at(rank);
  const int fd = connection.socket.fd();
  if (connection.receiving) {
    parking_.unwatch(fd);  // all that will ever come is here
    return;
  }
  char byte = 0;
  const ssize_t n = ::recv(fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
  if (n < 0 && (would_block() || errno == EINTR)) return;
  parking_.unwatch(fd);
  if (n != 1) lost(rank, connection);
  (void)hear_last_words(rank, connection);
}

// Looks at the message that is next. Throws the reason if it says that the peer's
// engine has ended; returns whether it is a goodbye, which concerns only a rank that still
// needs the peer.
bool TcpTransport::hear_last_words(int rank, const Connection& connection) const {
  if (connection.receiving) return false;
  std::byte bytes[kHeaderBytes + kReasonBytesMax + sizeof(MessageTail)];
  const ssize_t n = ::recv(connection.socket.fd(), bytes, sizeof bytes, MSG_DONTWAIT | MSG_PEEK);
  if (n <= 0) return false;
  const auto count = static_cast<std::size_t>(n);
  MessageHeader header;
  if (count < kHeaderBytes) options_.on_lost(rank);
  std::memcpy(&header, bytes, kHeaderBytes);
  if (const std::string fault = fault_of(header, connection.received, connection.theirs);
      !fault.empty()) {
    distrust(rank, fault);
  }
  if (header.kind != MessageKind::kFailure) return header.kind == MessageKind::kGoodbye;
  const std::size_t length = std::min<std::size_t>(header.bytes, kReasonBytesMax);
  if (count < kHeaderBytes + length + sizeof(MessageTail)) options_.on_lost(rank);
  const ConstBytes reason(bytes + kHeaderBytes, length);
  MessageTail tail;
  std::memcpy(&tail, bytes + kHeaderBytes + length, sizeof tail);
  if (crc32c(reason, header.crc) != tail) distrust(rank, "its last message is corrupted");
  end_for(rank, connection, reason);
}

// The peer's error, if its MAC shows that the peer has sent it.
void TcpTransport::end_for(int rank, const Connection& connection, ConstBytes reason) const {
  const auto error = decode_failure(reason, connection.received, connection.theirs);
  if (!error) distrust(rank, "its last message fails its MAC: it was changed in transit");
  throw Failure(*error);
}

void TcpTransport::departed(int rank) const {
  throw Failure(ErrorCode::kPeerDeparted,
                options_.described(rank) + " has shut down in the middle of a transfer");
}

void TcpTransport::lost(int rank, const Connection& connection) const {
  if (hear_last_words(rank, connection)) departed(rank);
  options_.on_lost(rank);
  throw Failure(ErrorCode::kPeerLost, options_.described(rank) + " was lost");
}

void TcpTransport::distrust(int rank, const std::string& fault) const {
  throw Failure(ErrorCode::kPeerLost, "data from " + options_.described(rank) + " to rank " +
                                          std::to_string(options_.rank) + " cannot be trusted: " +
                                          fault + "; check the network between them");
}

void TcpTransport::say_goodbye() noexcept {
  for (auto& [rank, connection] : connections_) {
    const MessageHeader header = make_goodbye(connection.sent, connection.own);
    say_last(connection, {reinterpret_cast<const char*>(&header), sizeof header});
  }
}

void TcpTransport::say_failure(const Error& error) noexcept {
  try {
    for (auto& [rank, connection] : connections_) {
      say_last(connection, encode_failure(error, connection.sent, connection.own));
    }
  } catch (const std::bad_alloc&) {
    // Nothing is sent then; the others see the connections close.
  }
}

void TcpTransport::say_last(Connection& connection, std::string_view message) noexcept {
  if (connection.sending || std::exchange(connection.closed, true)) return;
  const int fd = connection.socket.fd();
  (void)!::send(fd, message.data(), message.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  ::shutdown(fd, SHUT_WR);
}

}  // namespace polyhvd::tcp
