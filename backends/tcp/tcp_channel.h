// A control channel over one TCP connection between the leaders of two hosts. What does not carry
// its MAC, as the next message of the peer, ends the engine with an error that names both ranks.
#pragma once

#include <chrono>
#include <string>

#include "control/mac.h"
#include "control/signed_framing.h"
#include "engine/channel.h"
#include "engine/parking.h"
#include "tcp/socket.h"

namespace polyhvd::tcp {

class TcpChannel final : public Channel {
 public:
  struct Ends {
    int rank = 0;      // this one
    int peer = 0;      // world rank at the other end
    std::string name;  // of that rank in messages, such as "rank 3 (pid 812 on algo-2)"
  };

  TcpChannel(int fd, const SessionKeys& keys, Ends ends, Parking& parking);
  ~TcpChannel() override;

  void post(std::string_view payload) override;
  bool flush() override;
  bool poll(std::string& payload) override;
  void beat(std::chrono::steady_clock::time_point now) override;
  int peer() const noexcept override { return ends_.peer; }

 private:
  bool next(std::string& payload);

  Socket socket_;
  const Ends ends_;
  Parking& parking_;
  std::string pending_;
  std::size_t sent_ = 0;
  SignedFrameWriter writer_;
  SignedFrameReader reader_;
  bool spoke_ = false;  // since the last beat
  std::chrono::steady_clock::time_point next_beat_{};
};

}  // namespace polyhvd::tcp
