#include "nccl/gpu_stream_group.h"

#include <thread>

namespace polyhvd::nccl {
namespace {

// A wait asks every few microseconds, and this is not what it waits for.
constexpr auto kCheckInterval = std::chrono::milliseconds(10);
// Ranks end together; one that is not coming is not waited for.
constexpr auto kFarewellTime = std::chrono::seconds(3);
constexpr auto kNap = std::chrono::microseconds(100);

}  // namespace

GpuStreamGroup::GpuStreamGroup(std::shared_ptr<const Library> library, std::string label,
                               gpu::ContextPtr context, std::shared_ptr<gpu::OwnStream> stream,
                               Parking& parking, const UniqueId& id, int size, int position,
                               Deadline deadline)
    : label_(label),
      context_(std::move(context)),
      parking_(parking),
      stream_(std::move(stream)),
      connection_(std::move(library), std::move(label)) {
  {
    const gpu::Current current(*context_);
    connection_.begin(id, size, position);
  }
  connection_.settle("connecting the ranks", parking_, deadline);
}

GpuStreamGroup::~GpuStreamGroup() {
  if (aborted_) return;
  finish();
  try {
    const bool ended = flights_.empty() && !connection_.trouble();
    if (ended) buffer_.reset();
    if (ended && connection_.close(Clock::now() + kFarewellTime)) return;
  } catch (const Failure&) {  // the GPU has failed: nothing can be ended in good order
  }
  abort();
}

FusionBuffer& GpuStreamGroup::fusion_buffer() {
  if (!buffer_) buffer_.emplace(connection_, context_);
  return *buffer_;
}

DeviceEventPtr GpuStreamGroup::end_batch(Clock::duration patience) {
  in_batch_ = false;
  DeviceEventPtr end = mark();
  land();
  if (flights_.empty()) front_since_ = Clock::now();
  flights_.push_back({end, patience});
  return end;
}

void GpuStreamGroup::land() {
  while (!flights_.empty() && flights_.front().end->reached()) {
    flights_.pop_front();
    front_since_ = Clock::now();
  }
}

void GpuStreamGroup::check() {
  const auto now = Clock::now();
  if (aborted_ || now < next_check_) return;
  next_check_ = now + kCheckInterval;
  if (const auto error = connection_.trouble()) throw Failure(*error);
  land();
  if (flights_.empty() || now - front_since_ < flights_.front().patience) return;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(now - front_since_);
  throw Failure(ErrorCode::kTimeout, label_ +
                                         ": an operation of NCCL on the GPU has not finished for " +
                                         std::to_string(seconds.count()) +
                                         " s; look for a rank whose GPU is stuck or far behind; "
                                         "POLYHVD_DATA_TIMEOUT_SECONDS sets the limit");
}

void GpuStreamGroup::finish() noexcept {
  if (aborted_) return;
  try {
    for (land(); !flights_.empty(); land()) {
      std::this_thread::sleep_for(kNap);
      check();
    }
  } catch (const Failure&) {  // what has not ended is aborted
  }
}

bool GpuStreamGroup::is_working() noexcept {
  try {
    land();
  } catch (const Failure&) {  // the GPU has failed: nothing ends
  }
  return !flights_.empty();
}

void GpuStreamGroup::abort() noexcept {
  aborted_ = true;
  if (buffer_) buffer_->leave();
  connection_.abort();
}

}  // namespace polyhvd::nccl
