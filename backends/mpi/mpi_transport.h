// Bytes between two ranks through MPI, for the algorithms of the host backend.
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "engine/transport.h"
#include "mpi/mpi_backend.h"

namespace polyhvd::mpi {

class MpiTransport final : public Transport {
 public:
  explicit MpiTransport(Resources& resources) : resources_(resources) {}
  ~MpiTransport() override;

  void exchange(int to, ConstBytes out, int from, Bytes in, Deadline deadline) override;
  void post(int to, ConstBytes out) override;
  void settle(std::size_t most, Deadline deadline) override;
  std::uint64_t bytes_sent() const noexcept override { return bytes_sent_.load(); }
  std::uint64_t bytes_received() const noexcept override { return bytes_received_.load(); }

 private:
  std::unique_ptr<Flight> spare();

  Resources& resources_;
  // Messages go through our memory, so that a wait that is given up does not touch the
  // caller's memory.
  std::unique_ptr<Flight> sending_ = std::make_unique<Flight>();
  std::unique_ptr<Flight> receiving_ = std::make_unique<Flight>();
  std::map<int, std::deque<std::unique_ptr<Flight>>> posted_;  // by rank
  std::vector<std::unique_ptr<Flight>> spares_;  // have landed; no more than have flown at once
  std::atomic<std::uint64_t> bytes_sent_{0};
  std::atomic<std::uint64_t> bytes_received_{0};
};

}  // namespace polyhvd::mpi
