#include "gpu/staging.h"

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>

#include "engine/poll_wait.h"

namespace polyhvd::gpu {
namespace {

constexpr auto kSettleTime = std::chrono::seconds(2);
constexpr auto kNap = std::chrono::microseconds(100);

}  // namespace

// Both directions wait: memory that is delivered to may still be read by what came before.
void Staging::begin(Device device, std::span<const DeviceEventPtr> ready) {
  const ContextPtr context = devices_->context(device);
  if (!streams_) streams_ = std::make_unique<Streams>(context);
  delivered_ = nullptr;
  for (const DeviceEventPtr& event : ready) {
    event->hold(streams_->to_host.get());
    event->hold(streams_->to_device.get());
  }
}

void Staging::copy_to_host(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes == 0) return;
  fetching_ = true;
  streams_->to_host.copy_to_host(to, from, bytes);
  bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

void Staging::copy_to_device(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes == 0) return;
  delivering_ = true;
  streams_->to_device.copy_to_device(to, from, bytes);
  bytes_.fetch_add(bytes, std::memory_order_relaxed);
}

Staging::Slot& Staging::take_slot(std::size_t rounds, std::size_t bytes, Deadline deadline) {
  const bool is_large = rounds == 1 && bytes > slot_bytes_;
  Slot& slot = is_large ? large_ : slots_[turn_++ % slots_.size()];
  if (slot.delivered) {
    await(slot.delivered, deadline);
    slot.delivered = nullptr;
  }
  if (!slot.memory || slot.memory->bytes() < bytes) {
    slot.memory.reset();  // first, as there may not be enough for both
    slot.memory = std::make_unique<PinnedMemory>(streams_->context, std::max(bytes, slot_bytes_));
  }
  return slot;
}

void Staging::await(const DeviceEventPtr& event, Deadline deadline) {
  try {
    poll_wait(parking_, [&] { return event->reached(); }, deadline);
  } catch (const Failure& failure) {
    if (failure.error().code != ErrorCode::kTimeout) throw;
    throw Failure(ErrorCode::kTimeout,
                  "GPU " + std::to_string(streams_->context->device()) +
                      " did not finish the earlier work of its streams in time; look for a kernel "
                      "that hangs, and for a rank of this host that does not take part in an "
                      "operation of NCCL; POLYHVD_DATA_TIMEOUT_SECONDS sets the limit");
  }
}

DeviceEventPtr Staging::note_fetched() {
  return std::exchange(fetching_, false) ? streams_->to_host.record() : nullptr;
}

void Staging::note_delivered(Slot& slot) {
  if (!std::exchange(delivering_, false)) return;
  slot.delivered = streams_->to_device.record();
  delivered_ = slot.delivered;
}

void Staging::check() const {
  for (const Slot& slot : slots_) {
    if (slot.delivered) slot.delivered->reached();
  }
  if (large_.delivered) large_.delivered->reached();
}

// What still waits for a program's own work after that may wait for ever, and reads and writes
// pinned memory that is not handed out any more.
void Staging::settle() noexcept {
  if (!streams_ || std::exchange(settled_, true)) return;
  try {
    const DeviceEventPtr fetched = streams_->to_host.record();
    const DeviceEventPtr delivered = streams_->to_device.record();
    const auto until = Parking::Clock::now() + kSettleTime;
    while (Parking::Clock::now() < until) {
      if (fetched->reached() && delivered->reached()) return;
      std::this_thread::sleep_for(kNap);
    }
  } catch (const Failure&) {  // a GPU that has failed copies nothing any more
  }
  for (Slot& slot : slots_) {
    if (slot.memory) slot.memory->leave();
  }
  if (large_.memory) large_.memory->leave();
}

}  // namespace polyhvd::gpu
