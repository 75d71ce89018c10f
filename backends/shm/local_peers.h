// The other ranks of this host: wakes them, sees them leave or die.
#pragma once

#include <vector>

#include "engine/parking.h"
#include "shm/segment.h"

namespace polyhvd::shm {

// A rank of this host at the other end of a Unix socket.
struct LocalPeer {
  int local = 0;  // position in the domain
  int world_rank = 0;
  int fd = -1;  // owned; -1 for this rank itself
};

class LocalPeers {
 public:
  // Takes the descriptors over and watches them in `parking`. A peer that closes
  // its socket without having set its departed flag is reported to `on_lost`.
  LocalPeers(Segment& segment, Parking& parking, std::vector<LocalPeer> peers, int self,
             std::function<void(int world_rank)> on_lost);
  ~LocalPeers();
  LocalPeers(const LocalPeers&) = delete;
  LocalPeers& operator=(const LocalPeers&) = delete;

  // Wakes a peer whose sleep flag is at least `level`. To be called after the
  // store that it waits for, which must be sequentially consistent. Any thread.
  void wake(int local, std::uint32_t level = Parking::kDozing) noexcept;
  void wake_all() noexcept;

 private:
  void on_event(const LocalPeer& peer, short revents);

  Segment& segment_;
  Parking& parking_;
  std::vector<LocalPeer> peers_;  // by position in the domain
  int self_;
  std::function<void(int)> on_lost_;
};

}  // namespace polyhvd::shm
