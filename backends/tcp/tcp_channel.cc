#include "tcp/tcp_channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace polyhvd::tcp {
namespace {

constexpr auto kBeatInterval = std::chrono::seconds(1);

}  // namespace

TcpChannel::TcpChannel(int fd, const SessionKeys& keys, Ends ends, Parking& parking)
    : socket_(fd),
      ends_(std::move(ends)),
      parking_(parking),
      writer_(keys.send),
      reader_(keys.receive) {
  parking_.watch(socket_.fd(), POLLIN, [](short) {});  // poll() below reads it
}

TcpChannel::~TcpChannel() { parking_.unwatch(socket_.fd()); }

void TcpChannel::post(std::string_view payload) {
  if (sent_ == pending_.size()) {
    pending_.clear();
    sent_ = 0;
  }
  writer_.append(pending_, payload);
  spoke_ = true;
  flush();
}

// After a silence: what was lost on the way is noticed by the next frame's number.
void TcpChannel::beat(std::chrono::steady_clock::time_point now) {
  if (now < next_beat_) return;
  next_beat_ = now + kBeatInterval;
  if (!std::exchange(spoke_, false) && sent_ == pending_.size()) post({});
}

bool TcpChannel::flush() {
  while (sent_ < pending_.size()) {
    const ssize_t n = send(socket_.fd(), pending_.data() + sent_, pending_.size() - sent_,
                           MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n > 0) {
      sent_ += static_cast<std::size_t>(n);
    } else if (n < 0 && errno == EINTR) {
      continue;
    } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      parking_.set_events(socket_.fd(), POLLIN | POLLOUT);
      return false;
    } else {
      // The other end is closed. What it sent before still waits to be read, and
      // may be a farewell: poll() finds out.
      sent_ = pending_.size();
      break;
    }
  }
  parking_.set_events(socket_.fd(), 0);
  return true;
}

bool TcpChannel::next(std::string& payload) {
  try {
    while (reader_.next(payload)) {
      if (!payload.empty()) return true;  // a heartbeat has only its number
    }
    return false;
  } catch (const Failure& failure) {
    throw Failure(failure.error().code,
                  "a control message from " + ends_.name + " to rank " +
                      std::to_string(ends_.rank) + " was changed, replayed or lost in transit: " +
                      failure.error().message + "; check the network between them");
  }
}

bool TcpChannel::poll(std::string& payload) {
  if (next(payload)) return true;
  std::byte bytes[16 << 10];
  for (;;) {
    const ssize_t n = recv(socket_.fd(), bytes, sizeof bytes, MSG_DONTWAIT);
    if (n > 0) {
      reader_.append(bytes, static_cast<std::size_t>(n));
      if (next(payload)) return true;
    } else if (n < 0 && errno == EINTR) {
      continue;
    } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      return false;
    } else {
      throw Failure(ErrorCode::kPeerLost,
                    ends_.name + " was lost: its control connection " +
                        (n == 0 ? "was closed without shutdown()"
                                : std::string("broke: ") + std::strerror(errno)));
    }
  }
}

}  // namespace polyhvd::tcp
