#include "shm/local_peers.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>

namespace polyhvd::shm {

LocalPeers::LocalPeers(Segment& segment, Parking& parking, std::vector<LocalPeer> peers, int self,
                       std::function<void(int)> on_lost)
    : segment_(segment),
      parking_(parking),
      peers_(std::move(peers)),
      self_(self),
      on_lost_(std::move(on_lost)) {
  for (const LocalPeer& peer : peers_) {
    if (peer.fd < 0) continue;
    parking_.watch(peer.fd, POLLIN | POLLRDHUP,
                   [this, &peer](short revents) { on_event(peer, revents); });
  }
}

LocalPeers::~LocalPeers() {
  for (const LocalPeer& peer : peers_) {
    if (peer.fd < 0) continue;
    parking_.unwatch(peer.fd);
    close(peer.fd);
  }
}

void LocalPeers::wake(int local, std::uint32_t level) noexcept {
  std::atomic<std::uint32_t>& flag = segment_.sleep_flag(local);
  if (flag.load() < level || flag.exchange(Parking::kAwake) == Parking::kAwake) return;
  const char bell = 1;
  // A full socket already holds a wake-up; a closed one is seen by whoever sleeps.
  (void)!send(peers_[static_cast<std::size_t>(local)].fd, &bell, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

void LocalPeers::wake_all() noexcept {
  for (const LocalPeer& peer : peers_) {
    if (peer.local != self_) wake(peer.local);
  }
}

void LocalPeers::on_event(const LocalPeer& peer, short revents) {
  char bells[256];
  for (;;) {
    const ssize_t n = recv(peer.fd, bells, sizeof bells, MSG_DONTWAIT);
    if (n > 0) continue;
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
      if ((revents & (POLLERR | POLLHUP | POLLNVAL)) == 0) return;
    }
    break;  // the other end is closed
  }
  parking_.unwatch(peer.fd);
  if (segment_.departed_flag(peer.local).load() == 0) on_lost_(peer.world_rank);
}

}  // namespace polyhvd::shm
