// The way between a GPU and the CPUs: pinned memory in slots, a stream for each direction, and
// rounds that overlap. While the CPUs work on one round, the next one is fetched and the last
// one delivered. The caller holds the driver's role.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "engine/parking.h"
#include "engine/transport.h"
#include "gpu/devices.h"

namespace polyhvd::gpu {

class Staging {
 public:
  // Of a round. PCIe moves them in a fraction of a millisecond, which hides what it costs to
  // begin a round, and the slots still fit into a processor's cache.
  static constexpr std::size_t kSlotBytes = 4 << 20;

  Staging(std::shared_ptr<Devices> devices, Parking& parking, std::size_t slot_bytes = kSlotBytes)
      : devices_(std::move(devices)), parking_(parking), slot_bytes_(slot_bytes) {}
  ~Staging() { settle(); }
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  std::size_t slot_bytes() const noexcept { return slot_bytes_; }
  // That went up or down; any thread.
  std::uint64_t bytes() const noexcept { return bytes_.load(std::memory_order_relaxed); }

  // As in Communicator.
  void begin(Device device, std::span<const DeviceEventPtr> ready);
  DeviceEventPtr end() { return std::exchange(delivered_, nullptr); }
  void check() const;
  // Waits for copies that are under way, but not for ever; no other calls follow.
  void settle() noexcept;

  // Each round has `bytes` of pinned memory, in turn for fetch(round, memory), which calls
  // copy_to_host, for exchange(round, memory) among the CPUs, and for deliver(round, memory),
  // which calls copy_to_device. Returns when the last exchange has. Throws as Parking does.
  template <class Fetch, class Exchange, class Deliver>
  void run(std::size_t rounds, std::size_t bytes, Deadline deadline, Fetch&& fetch,
           Exchange&& exchange, Deliver&& deliver);
  void copy_to_host(std::byte* to, const std::byte* from, std::size_t bytes);
  void copy_to_device(std::byte* to, const std::byte* from, std::size_t bytes);

 private:
  struct Slot {
    std::unique_ptr<PinnedMemory> memory;
    DeviceEventPtr fetched;    // null: there was nothing to fetch
    DeviceEventPtr delivered;  // from here on the memory is free
  };
  // What is needed once a GPU has been used.
  struct Streams {
    explicit Streams(const ContextPtr& c) : context(c), to_host(c, true), to_device(c, true) {}
    ContextPtr context;
    OwnStream to_host;
    OwnStream to_device;
  };

  Slot& take_slot(std::size_t rounds, std::size_t bytes, Deadline deadline);
  void await(const DeviceEventPtr& event, Deadline deadline);
  DeviceEventPtr note_fetched();
  void note_delivered(Slot& slot);

  const std::shared_ptr<Devices> devices_;
  Parking& parking_;
  const std::size_t slot_bytes_;
  std::unique_ptr<Streams> streams_;
  std::array<Slot, 3> slots_;  // on the way in, with the CPUs, on the way out
  Slot large_;                 // for what is done in one round, however large
  std::size_t turn_ = 0;
  bool fetching_ = false;    // something was fetched that no event covers yet
  bool delivering_ = false;  // likewise
  bool settled_ = false;
  DeviceEventPtr delivered_;  // the last one since begin()
  std::atomic<std::uint64_t> bytes_{0};
};

template <class Fetch, class Exchange, class Deliver>
void Staging::run(std::size_t rounds, std::size_t bytes, Deadline deadline, Fetch&& fetch,
                  Exchange&& exchange, Deliver&& deliver) {
  const auto start = [&](std::size_t round) -> Slot* {
    if (round == rounds) return nullptr;
    Slot& slot = take_slot(rounds, bytes, deadline);
    fetch(round, slot.memory->data());
    slot.fetched = note_fetched();
    return &slot;
  };
  Slot* next = start(0);
  for (std::size_t round = 0; round < rounds; ++round) {
    Slot& slot = *next;
    next = start(round + 1);
    if (slot.fetched) await(slot.fetched, deadline);
    exchange(round, slot.memory->data());
    deliver(round, slot.memory->data());
    note_delivered(slot);
  }
}

}  // namespace polyhvd::gpu
