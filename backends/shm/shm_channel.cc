#include "shm/shm_channel.h"

#include <algorithm>
#include <cstring>

namespace polyhvd::shm {

void ShmChannel::post(std::string_view payload) {
  if (sent_ == pending_.size()) {
    pending_.clear();
    sent_ = 0;
  }
  writer_.append(pending_, payload);
  flush();
}

bool ShmChannel::flush() {
  if (sent_ == pending_.size()) return true;
  const std::uint64_t written = out_.written.value.load(std::memory_order_relaxed);
  // The reader's cache has that line; it is fetched only when the ring looks filled.
  const std::size_t remaining = pending_.size() - sent_;
  if (written + remaining - seen_read_ > kRingBytes / 2) {
    seen_read_ = out_.read.value.load();  // pairs with the sleep flag, as in poll()
  }
  const std::size_t room = kRingBytes - static_cast<std::size_t>(written - seen_read_);
  const std::size_t count = std::min(room, remaining);
  if (count == 0) return false;
  const std::size_t at = written % kRingBytes;
  const std::size_t first = std::min(count, kRingBytes - at);
  std::memcpy(out_.data + at, pending_.data() + sent_, first);
  std::memcpy(out_.data, pending_.data() + sent_ + first, count - first);
  out_.written.value.store(written + count);  // sequentially consistent: wake() reads a flag next
  // A peer with nothing pending looks at the ring when it next has; do not take a
  // core from its computation before the ring gets full.
  const bool filling = room - count < kRingBytes / 2;
  peers_.wake(peer_local_, filling ? Parking::kDozing : Parking::kWaiting);
  sent_ += count;
  return sent_ == pending_.size();
}

bool ShmChannel::poll(std::string& payload) {
  const std::uint64_t read = in_.read.value.load(std::memory_order_relaxed);
  const std::uint64_t written = in_.written.value.load();  // pairs with the sleep flag
  if (written == read) return reader_.next(payload);
  const auto count = static_cast<std::size_t>(written - read);
  if (count > kRingBytes) {
    throw Failure(ErrorCode::kPeerLost, "a control ring is corrupted");
  }
  const std::size_t at = read % kRingBytes;
  const std::size_t first = std::min(count, kRingBytes - at);
  reader_.append(in_.data + at, first);
  reader_.append(in_.data, count - first);
  in_.read.value.store(written);
  if (count > kRingBytes / 2) peers_.wake(peer_local_);  // it may wait for room
  return reader_.next(payload);
}

}  // namespace polyhvd::shm
