// One process set's NCCL state on this rank's GPU: the rank's stream, the connection whose
// calls run on it, and what it has been given and has not done. The driver's.
#pragma once

#include <chrono>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "engine/parking.h"
#include "gpu/driver.h"
#include "nccl/connection.h"
#include "nccl/fusion_buffer.h"

namespace polyhvd::nccl {

class GpuStreamGroup {
 public:
  using Clock = Parking::Clock;

  // Connects the ranks, all of which make one with the same id. Throws as Connection does.
  GpuStreamGroup(std::shared_ptr<const Library> library, std::string label, gpu::ContextPtr context,
                 std::shared_ptr<gpu::OwnStream> stream, Parking& parking, const UniqueId& id,
                 int size, int position, Deadline deadline);
  // Finishes, and waits a bounded time for the others to end as well.
  ~GpuStreamGroup();
  GpuStreamGroup(const GpuStreamGroup&) = delete;
  GpuStreamGroup& operator=(const GpuStreamGroup&) = delete;

  const Connection& connection() const noexcept { return connection_; }
  const Functions& call() const noexcept { return connection_.library().call; }
  Comm comm() const noexcept { return connection_.get(); }
  Stream stream() const noexcept { return stream_->get(); }
  const gpu::Context& context() const noexcept { return *context_; }
  FusionBuffer& fusion_buffer();

  // Where the stream is now.
  DeviceEventPtr mark() const { return stream_->record(); }
  // What follows begins when all of these are reached.
  void hold(std::span<const DeviceEventPtr> events) const {
    for (const DeviceEventPtr& event : events) event->hold(stream_->get());
  }
  // `calls` are one launch; returns when the stream has been given it.
  template <class Calls>
  void launch(const char* what, Deadline deadline, Calls&& calls) {
    const gpu::Current current(*context_);
    Group group(connection_);
    calls();
    group.end();
    connection_.settle(what, parking_, deadline);
  }

  // Begins a batch, or continues it: its tensors hold their values when `ready` is reached.
  void join_batch(std::span<const DeviceEventPtr> ready) {
    if (!std::exchange(in_batch_, true)) hold(ready);
  }
  bool in_batch() const noexcept { return in_batch_; }
  // The end of the batch, which may take `patience` once all before it is done.
  DeviceEventPtr end_batch(Clock::duration patience);
  // Throws Failure when a batch cannot end, or does not in time.
  void check();
  // Returns when every batch has ended, or check() would throw.
  void finish() noexcept;
  // Whether a batch has not ended.
  bool is_working() noexcept;
  void abort() noexcept;

 private:
  struct Flight {
    DeviceEventPtr end;
    Clock::duration patience;
  };
  void land();

  const std::string label_;
  const gpu::ContextPtr context_;
  Parking& parking_;
  const std::shared_ptr<gpu::OwnStream> stream_;
  Connection connection_;
  std::optional<FusionBuffer> buffer_;
  std::deque<Flight> flights_;
  Clock::time_point front_since_{};  // when the oldest flight became that
  Clock::time_point next_check_{};
  bool in_batch_ = false;
  bool aborted_ = false;
};

}  // namespace polyhvd::nccl
