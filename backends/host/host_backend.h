// The CPU backend: shared memory within a host, a Transport between hosts.
// Algorithms are described in docs/algorithms.md.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "engine/backend.h"
#include "engine/parking.h"
#include "engine/transport.h"
#include "shm/local_peers.h"
#include "shm/segment.h"

namespace polyhvd::host {

// Whether ranks of a host read and write each other's memory instead of handing tensors over
// in the segment: never, where that was found faster, or wherever it is possible.
enum class Attaching : std::uint8_t { kNever = 0, kAuto = 1, kAlways = 2 };

// What a rank's communicators share. Everything outlives them.
struct Resources {
  int rank = 0;
  std::vector<std::vector<int>> domains;  // ranks that share a segment, as in connections.py
  std::vector<int> domain_of;             // by world rank
  shm::Segment* segment = nullptr;        // null when this rank's domain has one rank
  shm::LocalPeers* peers = nullptr;       // likewise
  Transport* transport = nullptr;         // null when there is one domain
  Parking* parking = nullptr;
  bool reproducible = false;               // sums do not depend on how ranks are spread over hosts
  Attaching attaching = Attaching::kAuto;  // of the ranks that differ the least holds
  std::vector<int> pids;  // by world rank; 0, or none: not on this host, or unknown
  Tuning tuning;          // the driver's
  // Moves control traffic along, between the steps of a long transfer.
  std::function<void()> overlap = [] {};
  // Bytes staged by this rank or read from others' memory; only bytes read. Any thread reads them.
  std::atomic<std::uint64_t> shm_bytes{0};
  std::atomic<std::uint64_t> cma_bytes{0};
};

class HostBackend final : public Backend {
 public:
  explicit HostBackend(Resources& resources) : resources_(resources) {}
  std::string_view name() const noexcept override { return "host"; }
  bool supports(OpKind kind, DType dtype, ReduceOp op, DeviceKind device) const override;
  std::unique_ptr<Communicator> connect(ProcessSetId set, const Place& place,
                                        std::span<const int> members,
                                        Communicator* on_cpu) override;
  void tune(const Tuning& tuning) override { resources_.tuning = tuning; }

 private:
  Resources& resources_;
};

}  // namespace polyhvd::host
