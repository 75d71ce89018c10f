#include "block_pool.h"

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

namespace polyhvd::tf {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::uint64_t kTrimInterval = 256;

void destroy(BlockPool::Block* block) noexcept {
  std::free(block->data);
  delete block;
}

}  // namespace

BlockPool::Block* BlockPool::take(std::size_t bytes) {
  const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  std::vector<Block*> stale;
  Block* found = nullptr;
  {
    std::lock_guard lock(mutex_);
    ++requests_;
    const auto it = free_.lower_bound(rounded);
    if (it != free_.end() && it->first <= rounded + rounded / 4) {
      found = it->second;
      free_.erase(it);
    }
    if (requests_ % kTrimInterval == 0) {
      std::erase_if(free_, [&](const auto& item) {
        if (item.second->freed_at + kIdleRequestsMax > requests_) return false;
        stale.push_back(item.second);
        return true;
      });
    }
  }
  for (Block* block : stale) destroy(block);
  if (found != nullptr) return found;
  auto block = std::make_unique<Block>(Block{nullptr, rounded, 0});
  block->data = std::aligned_alloc(kAlignment, rounded);
  if (block->data == nullptr) throw std::bad_alloc();
  return block.release();
}

void BlockPool::give_back(Block* block) noexcept {
  try {
    std::lock_guard lock(mutex_);
    block->freed_at = requests_;
    free_.emplace(block->bytes, block);
  } catch (const std::bad_alloc&) {
    destroy(block);
  }
}

}  // namespace polyhvd::tf
