// A control channel over one TCP connection between the leaders of two hosts.
#pragma once

#include <chrono>
#include <string>

#include "control/framing.h"
#include "engine/channel.h"
#include "engine/parking.h"
#include "tcp/socket.h"

namespace polyhvd::tcp {

class TcpChannel final : public Channel {
 public:
  // `who` names the peer in messages, such as "rank 3 (pid 812 on algo-2)".
  TcpChannel(int fd, int peer_world_rank, std::string who, Parking& parking);
  ~TcpChannel() override;

  void post(std::string_view payload) override;
  bool flush() override;
  bool poll(std::string& payload) override;
  void beat(std::chrono::steady_clock::time_point now) override;
  int peer() const noexcept override { return peer_; }

 private:
  bool next(std::string& payload);

  Socket socket_;
  int peer_;
  std::string who_;
  Parking& parking_;
  std::string pending_;
  std::size_t sent_ = 0;
  FrameWriter writer_;
  FrameReader reader_;
  bool spoke_ = false;  // since the last beat
  std::chrono::steady_clock::time_point next_beat_{};
};

}  // namespace polyhvd::tcp
