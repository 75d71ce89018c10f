#include "engine/memory_in_flight.h"

#include <algorithm>

namespace polyhvd {

bool MemoryInFlight::conflicts(std::uintptr_t begin, std::uintptr_t end, bool write) const {
  const std::uintptr_t back = std::min<std::uintptr_t>(begin, longest_overlapping_);
  auto it = intervals_.lower_bound(begin - back);
  // Disjoint intervals: the one before is the only other that can reach us.
  if (it != intervals_.begin()) --it;
  for (; it != intervals_.end() && it->first < end; ++it) {
    if (it->second.end > begin && (write || it->second.written)) return true;
  }
  return false;
}

bool MemoryInFlight::add(const void* data, std::size_t bytes, bool write) {
  if (bytes == 0) return true;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  const std::uintptr_t end = begin + bytes;
  if (conflicts(begin, end, write)) return false;
  if (!write) {
    auto [first, last] = intervals_.equal_range(begin);
    for (auto it = first; it != last; ++it) {
      if (it->second.end == end) {
        ++it->second.readers;
        return true;
      }
    }
    if (conflicts(begin, end, true)) longest_overlapping_ = std::max(longest_overlapping_, bytes);
    // The overlapped one may be the longer: it has to be found from behind, too.
    for (auto it = intervals_.begin(); longest_overlapping_ > 0 && it != intervals_.end(); ++it) {
      longest_overlapping_ = std::max(longest_overlapping_, it->second.end - it->first);
    }
  }
  intervals_.emplace(begin, Interval{end, write ? 0 : 1, write});
  return true;
}

void MemoryInFlight::remove(const void* data, std::size_t bytes, bool write) {
  if (bytes == 0) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  auto [first, last] = intervals_.equal_range(begin);
  for (auto it = first; it != last; ++it) {
    if (it->second.end != begin + bytes || it->second.written != write) continue;
    if (!write && --it->second.readers > 0) return;
    intervals_.erase(it);
    break;
  }
  if (intervals_.empty()) longest_overlapping_ = 0;
}

}  // namespace polyhvd
