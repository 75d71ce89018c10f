// Remembers which memory operations in flight read and write, so that an output
// that overlaps any of it is refused before it corrupts data. Not thread-safe:
// the operation queue's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace polyhvd {

class MemoryInFlight {
 public:
  // False, and nothing changes, when the access would conflict: a write with
  // anything, a read with a write.
  bool add(const void* data, std::size_t bytes, bool write);
  void remove(const void* data, std::size_t bytes, bool write);

 private:
  struct Interval {
    std::uintptr_t end = 0;
    int readers = 0;
    bool written = false;
  };
  bool conflicts(std::uintptr_t begin, std::uintptr_t end, bool write) const;

  // Intervals start at their key. Only readers may overlap each other; then
  // longest_ bounds how far back a look-up has to begin.
  std::multimap<std::uintptr_t, Interval> intervals_;
  std::size_t longest_overlapping_ = 0;
};

}  // namespace polyhvd
