// Tensor bytes between ranks of different hosts, over one TCP connection per pair of
// ranks, in messages (message.h). What was lost, repeated, cut short or, with
// checksums, changed on the way ends the engine with an error that names both ranks.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "control/error.h"
#include "control/mac.h"
#include "engine/parking.h"
#include "engine/transport.h"
#include "tcp/socket.h"

namespace polyhvd::tcp {

class TcpTransport final : public Transport {
 public:
  struct Options {
    int rank = 0;            // this one, for messages
    bool checksums = false;  // of the bytes that this rank sends; what comes with one is checked
    // Names a peer in messages, such as "rank 3 (pid 812 on algo-2)".
    std::function<std::string(int world_rank)> described;
    // Called for a peer that closes without last words; throws.
    std::function<void(int world_rank)> on_lost;
  };

  // Takes the descriptors (by world rank) over; each needs its keys.
  TcpTransport(const std::map<int, int>& fds, const std::map<int, SessionKeys>& keys,
               Parking& parking, Options options);
  ~TcpTransport() override;

  void exchange(int to, ConstBytes out, int from, Bytes in, Deadline deadline) override;
  void post(int to, ConstBytes out) override;
  void settle(std::size_t most, Deadline deadline) override;

  // The last words to every peer, best effort: that this rank leaves in good order, or
  // why its engine has ended. A peer that is in the middle of a message receives nothing.
  void say_goodbye() noexcept;
  void say_failure(const Error& error) noexcept;

  // Any thread.
  std::uint64_t bytes_sent() const noexcept override {
    return sent_.load(std::memory_order_relaxed);
  }
  std::uint64_t bytes_received() const noexcept override {
    return received_.load(std::memory_order_relaxed);
  }
  // Of those received, what came with a checksum of theirs that was right.
  std::uint64_t bytes_checked() const noexcept { return checked_.load(std::memory_order_relaxed); }

 private:
  struct Outgoing;
  struct Incoming;
  struct Connection {
    Connection(int fd, const SessionKeys& keys);
    Connection(Connection&&) noexcept;
    ~Connection();
    Socket socket;
    Mac own;                       // of this rank's last words
    Mac theirs;                    // of the peer's
    std::vector<Outgoing> posted;  // in order; the first one may be half sent
    std::uint32_t sent = 0;        // whole messages
    std::uint32_t received = 0;    // likewise
    bool sending = false;          // in the middle of a message
    bool receiving = false;        // likewise
    bool closed = false;           // for sending
  };
  class Interest;

  void await(Incoming& receiving, const std::function<bool()>& sent, Deadline deadline);
  bool advance_posted();
  Connection& connection_to(int rank);
  void on_close(int rank);
  bool hear_last_words(int rank, const Connection& connection) const;
  [[noreturn]] void departed(int rank) const;
  [[noreturn]] void lost(int rank, const Connection& connection) const;
  [[noreturn]] void end_for(int rank, const Connection& connection, ConstBytes reason) const;
  [[noreturn]] void distrust(int rank, const std::string& fault) const;
  void say_last(Connection& connection, std::string_view message) noexcept;

  std::map<int, Connection> connections_;
  std::vector<Connection*> posting_;  // those with messages to be sent
  Interest* interest_ = nullptr;      // of the wait that is going on
  Parking& parking_;
  const Options options_;
  std::atomic<std::uint64_t> sent_{0};      // written by the driver, read by counters()
  std::atomic<std::uint64_t> received_{0};  // likewise
  std::atomic<std::uint64_t> checked_{0};   // likewise
};

}  // namespace polyhvd::tcp
