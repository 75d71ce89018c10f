// Memory for large outputs, kept between steps: pages that were touched once need
// not be mapped and cleared again. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace polyhvd::tf {

class BlockPool {
 public:
  // Smaller blocks gain nothing: the heap keeps their pages.
  static constexpr std::size_t kBytesMin = 256 * 1024;
  // A free block that was not wanted for so many requests goes back to the system.
  static constexpr std::uint64_t kIdleRequestsMax = 1024;

  struct Block {
    void* data;  // 64-byte aligned
    std::size_t bytes;
    std::uint64_t freed_at;
  };

  // A block of at least `bytes`, the caller's until give_back(). Throws std::bad_alloc.
  Block* take(std::size_t bytes);
  void give_back(Block* block) noexcept;

 private:
  std::mutex mutex_;
  // Both guarded by mutex_.
  std::multimap<std::size_t, Block*> free_;
  std::uint64_t requests_ = 0;
};

}  // namespace polyhvd::tf
