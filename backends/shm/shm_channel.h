// A control channel between a rank and its host's leader: two rings in the
// shared segment.
#pragma once

#include <string>

#include "control/framing.h"
#include "engine/channel.h"
#include "shm/local_peers.h"
#include "shm/segment.h"

namespace polyhvd::shm {

class ShmChannel final : public Channel {
 public:
  ShmChannel(Ring& out, Ring& in, LocalPeers& peers, int peer_local, int peer_world_rank)
      : out_(out), in_(in), peers_(peers), peer_local_(peer_local), peer_(peer_world_rank) {}

  void post(std::string_view payload) override;
  bool flush() override;
  bool poll(std::string& payload) override;
  void nudge() noexcept override { peers_.wake(peer_local_); }
  int peer() const noexcept override { return peer_; }

 private:
  Ring& out_;
  Ring& in_;
  LocalPeers& peers_;
  int peer_local_;
  int peer_;
  std::string pending_;
  std::size_t sent_ = 0;         // bytes of pending_ already in the ring
  std::uint64_t seen_read_ = 0;  // out_.read when last looked at
  FrameWriter writer_;
  FrameReader reader_;
};

}  // namespace polyhvd::shm
