// Bytes between ranks on different hosts. Knows no tensors. The calling thread
// holds the driver's role; waits go through Parking, so they can be aborted.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>

namespace polyhvd {

using Bytes = std::span<std::byte>;
using ConstBytes = std::span<const std::byte>;
using Deadline = std::chrono::steady_clock::time_point;

class Transport {
 public:
  virtual ~Transport() = default;

  // One message to and one from a peer at the same time (peers may differ, and
  // either may be empty). Returns when both have been moved.
  // Throws Failure: kPeerLost, kTimeout, or what ends the wait.
  virtual void exchange(int to, ConstBytes out, int from, Bytes in, Deadline deadline) = 0;

  // Begins to send a message, behind those begun before; it moves on during other calls. `out`
  // must stay as it is until settle() says that the message is gone.
  virtual void post(int to, ConstBytes out) = 0;
  // Returns when at most `most` of the messages begun by post() to any one peer are not gone.
  virtual void settle(std::size_t most, Deadline deadline) = 0;

  void send(int to, ConstBytes out, Deadline deadline) { exchange(to, out, to, {}, deadline); }
  void recv(int from, Bytes in, Deadline deadline) { exchange(from, {}, from, in, deadline); }

  virtual std::uint64_t bytes_sent() const noexcept = 0;
  virtual std::uint64_t bytes_received() const noexcept = 0;
};

}  // namespace polyhvd
