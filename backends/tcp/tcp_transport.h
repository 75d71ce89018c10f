// Tensor bytes between ranks of different hosts, over one TCP connection per
// pair of ranks. A message is [u32 magic][u32 kind][u64 bytes] and the bytes, so
// that ranks which no longer agree notice it instead of mixing data.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "parking.h"
#include "tcp/socket.h"
#include "transport.h"

namespace polyhvd::tcp {

class TcpTransport final : public Transport {
 public:
  // Takes the descriptors (by world rank) over. A peer that closes without a
  // goodbye is reported to `on_lost`, which throws.
  TcpTransport(const std::map<int, int>& fds, Parking& parking,
               std::function<void(int world_rank)> on_lost);
  ~TcpTransport() override;

  void exchange(int to, ConstBytes out, int from, Bytes in, Deadline deadline) override;

  // Tells every peer that this rank leaves in good order. Best effort.
  void say_goodbye() noexcept;

  // Any thread.
  std::uint64_t bytes_sent() const noexcept override {
    return sent_.load(std::memory_order_relaxed);
  }
  std::uint64_t bytes_received() const noexcept override {
    return received_.load(std::memory_order_relaxed);
  }

 private:
  struct Outgoing;
  struct Incoming;
  void on_close(int rank);
  int fd_of(int rank) const;

  std::map<int, Socket> sockets_;
  Parking& parking_;
  std::function<void(int)> on_lost_;
  std::atomic<std::uint64_t> sent_{0};      // written by the driver, read by counters()
  std::atomic<std::uint64_t> received_{0};  // likewise
};

}  // namespace polyhvd::tcp
