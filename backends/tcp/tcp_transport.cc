#include "tcp/tcp_transport.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>

namespace polyhvd::tcp {
namespace {

constexpr std::uint32_t kMagic = 0x44564850;  // "PHVD"
enum MessageKind : std::uint32_t { kData = 1, kGoodbye = 2 };

struct MessageHeader {
  std::uint32_t magic = kMagic;
  std::uint32_t kind = kData;
  std::uint64_t bytes = 0;
};
static_assert(sizeof(MessageHeader) == 16);

bool would_block() { return errno == EAGAIN || errno == EWOULDBLOCK; }

using OnLost = std::function<void(int)>;

[[noreturn]] void lost(int rank, const OnLost& on_lost) {
  on_lost(rank);
  throw Failure(ErrorCode::kPeerLost, "rank " + std::to_string(rank) + " was lost");
}

}  // namespace

// The sending half of an exchange, as far as it has got.
struct TcpTransport::Outgoing {
  int rank;
  int fd;
  MessageHeader header;
  ConstBytes body;
  const OnLost& on_lost;
  std::size_t done = 0;

  std::size_t total() const { return sizeof header + body.size(); }
  bool finished() const { return fd < 0 || done == total(); }

  // Sends what fits; true when all is sent.
  bool advance() {
    while (!finished()) {
      iovec parts[2];
      int count = 0;
      if (done < sizeof header) {
        parts[count++] = {reinterpret_cast<char*>(&header) + done, sizeof header - done};
      }
      const std::size_t from = done > sizeof header ? done - sizeof header : 0;
      if (from < body.size()) {
        parts[count++] = {const_cast<std::byte*>(body.data()) + from, body.size() - from};
      }
      msghdr message{};
      message.msg_iov = parts;
      message.msg_iovlen = static_cast<std::size_t>(count);
      const ssize_t n = sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (n > 0) {
        done += static_cast<std::size_t>(n);
      } else if (n < 0 && errno == EINTR) {
        continue;
      } else if (n < 0 && would_block()) {
        return false;
      } else {
        lost(rank, on_lost);
      }
    }
    return true;
  }
};

// The receiving half.
struct TcpTransport::Incoming {
  int rank;
  int fd;
  Bytes body;
  const OnLost& on_lost;
  MessageHeader header{};
  std::size_t done = 0;

  std::size_t total() const { return sizeof header + body.size(); }
  bool finished() const { return fd < 0 || done == total(); }

  void check_header() const {
    if (header.magic == kMagic && header.kind == kGoodbye) {
      throw Failure(ErrorCode::kPeerDeparted,
                    "rank " + std::to_string(rank) + " has shut down in the middle of a transfer");
    }
    if (header.magic != kMagic || header.kind != kData || header.bytes != body.size()) {
      throw Failure(ErrorCode::kInternal, "rank " + std::to_string(rank) + " sent a message of " +
                                              std::to_string(header.bytes) + " bytes where " +
                                              std::to_string(body.size()) + " were agreed");
    }
  }

  bool advance() {
    while (!finished()) {
      std::byte* at = done < sizeof header ? reinterpret_cast<std::byte*>(&header) + done
                                           : body.data() + (done - sizeof header);
      const std::size_t want = done < sizeof header ? sizeof header - done : total() - done;
      const ssize_t n = ::recv(fd, at, want, MSG_DONTWAIT);
      if (n > 0) {
        done += static_cast<std::size_t>(n);
        if (done == sizeof header) check_header();
      } else if (n < 0 && errno == EINTR) {
        continue;
      } else if (n < 0 && would_block()) {
        return false;
      } else {
        lost(rank, on_lost);
      }
    }
    return true;
  }
};

TcpTransport::TcpTransport(const std::map<int, int>& fds, Parking& parking,
                           std::function<void(int)> on_lost)
    : parking_(parking), on_lost_(std::move(on_lost)) {
  for (const auto& [rank, fd] : fds) {
    sockets_.emplace(rank, Socket(fd));
    // Not POLLIN: a fast peer may send the next operation's data early.
    parking_.watch(fd, POLLRDHUP, [this, rank = rank](short revents) {
      if ((revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) on_close(rank);
    });
  }
}

TcpTransport::~TcpTransport() {
  for (const auto& [rank, socket] : sockets_) parking_.unwatch(socket.fd());
}

int TcpTransport::fd_of(int rank) const {
  const auto it = sockets_.find(rank);
  if (it == sockets_.end()) {
    throw Failure(ErrorCode::kInternal, "no data connection to rank " + std::to_string(rank));
  }
  return it->second.fd();
}

void TcpTransport::exchange(int to, ConstBytes out, int from, Bytes in, Deadline deadline) {
  Outgoing sending{to, out.empty() ? -1 : fd_of(to), {kMagic, kData, out.size()}, out, on_lost_};
  Incoming receiving{from, in.empty() ? -1 : fd_of(from), in, on_lost_};
  struct Interest {  // what to sleep for; back to idle whatever happens
    Parking& parking;
    int to_fd, from_fd;
    Interest(Parking& p, int t, int f) : parking(p), to_fd(t), from_fd(f) {
      if (to_fd == from_fd) {
        parking.set_events(to_fd, POLLIN | POLLOUT | POLLRDHUP);
      } else {
        parking.set_events(to_fd, POLLOUT | POLLRDHUP);
        parking.set_events(from_fd, POLLIN | POLLRDHUP);
      }
    }
    ~Interest() {
      parking.set_events(to_fd, 0);
      parking.set_events(from_fd, 0);
    }
  } interest(parking_, sending.fd, receiving.fd);
  bool sent = sending.finished();
  const auto advance = [&] {
    const bool was_sent = sent;
    sent = sending.advance();
    if (sent && !was_sent) {
      parking_.set_events(sending.fd, receiving.fd == sending.fd ? POLLIN | POLLRDHUP : 0);
    }
    return receiving.advance() && sent;
  };
  try {
    parking_.await(advance, deadline);
  } catch (const Failure& failure) {
    if (failure.error().code != ErrorCode::kTimeout) throw;
    throw Failure(ErrorCode::kTimeout, "rank " + std::to_string(sent ? from : to) +
                                           " does not take part in an agreed transfer in time; "
                                           "it may be suspended, or the network cut");
  }
  sent_.fetch_add(out.size(), std::memory_order_relaxed);
  received_.fetch_add(in.size(), std::memory_order_relaxed);
}

void TcpTransport::on_close(int rank) {
  const int fd = sockets_.at(rank).fd();
  MessageHeader header{};
  const ssize_t n = ::recv(fd, &header, sizeof header, MSG_DONTWAIT | MSG_PEEK);
  if (n < 0 && (would_block() || errno == EINTR)) return;
  // Closed. Data that was sent before stays readable, and a transfer that wants
  // more than that fails by itself.
  parking_.unwatch(fd);
  if (n != static_cast<ssize_t>(sizeof header) || header.magic != kMagic) on_lost_(rank);
}

void TcpTransport::say_goodbye() noexcept {
  const MessageHeader goodbye{kMagic, kGoodbye, 0};
  for (const auto& [rank, socket] : sockets_) {
    (void)!::send(socket.fd(), &goodbye, sizeof goodbye, MSG_DONTWAIT | MSG_NOSIGNAL);
    ::shutdown(socket.fd(), SHUT_WR);
  }
}

}  // namespace polyhvd::tcp
