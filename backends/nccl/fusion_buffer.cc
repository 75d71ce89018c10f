#include "nccl/fusion_buffer.h"

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "observe/lock_order.h"

namespace polyhvd::nccl {
namespace {

// Calls `use` with each run of bytes, and how many were before it.
template <class Use>
void for_each_run(Segments segments, std::size_t at, std::size_t bytes, Use&& use) {
  std::size_t done = 0;
  for (const Segment& segment : segments) {
    if (done == bytes) return;
    if (at >= segment.bytes) {
      at -= segment.bytes;
      continue;
    }
    const std::size_t run = std::min(bytes - done, segment.bytes - at);
    use(segment.data + at, done, run);
    done += run;
    at = 0;
  }
}

std::size_t aligned(std::size_t bytes) {
  return (bytes + FusionBuffer::kAlignment - 1) / FusionBuffer::kAlignment *
         FusionBuffer::kAlignment;
}

// What a kernel may still use that cannot be waited for.
void keep_for_good(std::shared_ptr<std::byte> memory) {
  static OrderedMutex<LockRank::nccl_kept> mutex;
  static auto& kept = *new std::vector<std::shared_ptr<std::byte>>;  // guarded by mutex
  const std::lock_guard lock(mutex);
  kept.push_back(std::move(memory));
}

}  // namespace

FusionBuffer::FusionBuffer(const Connection& connection, gpu::ContextPtr context)
    : connection_(connection), context_(std::move(context)) {
  const Functions& call = connection_.library().call;
  const gpu::Current current(*context_);
  // Memory of NCCL's own is the kind that every transport can reach by itself.
  void* memory = nullptr;
  if (call.MemAlloc != nullptr && call.MemFree != nullptr &&
      call.MemAlloc(&memory, kBytes) == Result::kSuccess) {
    data_ = static_cast<std::byte*>(memory);
  } else {
    plain_ = context_->allocate(kBytes);
    data_ = plain_.get();
  }
  if (call.CommRegister == nullptr || call.CommDeregister == nullptr) return;
  if (call.CommRegister(connection_.get(), data_, kBytes, &registration_) != Result::kSuccess) {
    registration_ = nullptr;  // it works without, through memory of NCCL's
  }
}

FusionBuffer::~FusionBuffer() {
  if (left_) {
    if (plain_) keep_for_good(std::move(plain_));
    return;
  }
  try {
    const gpu::Current current(*context_);
    const Functions& call = connection_.library().call;
    if (registration_ != nullptr) (void)call.CommDeregister(connection_.get(), registration_);
    if (!plain_) (void)call.MemFree(data_);
  } catch (const Failure&) {  // the GPU has failed: there is nothing to give back
  }
}

FusionBuffer::Packed FusionBuffer::pack(Stream stream, Segments from, std::size_t room) const {
  Packed packed;
  for (; packed.count < from.size(); ++packed.count) {
    const Segment& tensor = from[packed.count];
    if (packed.bytes + tensor.bytes > room) break;
    copy(*context_, stream, data_ + packed.bytes, tensor.data, tensor.bytes);
    packed.bytes = aligned(packed.bytes + tensor.bytes);
  }
  return packed;
}

void FusionBuffer::unpack(Stream stream, Segments to) const {
  std::size_t at = 0;
  for (const Segment& tensor : to) {
    copy(*context_, stream, tensor.data, data_ + at, tensor.bytes);
    at = aligned(at + tensor.bytes);
  }
}

void copy(const gpu::Context& context, Stream stream, std::byte* to, const std::byte* from,
          std::size_t bytes) {
  if (bytes == 0) return;
  const gpu::Current current(context);
  context.check(
      context.functions().MemcpyDtoDAsync(reinterpret_cast<gpu::Address>(to),
                                          reinterpret_cast<gpu::Address>(from), bytes, stream),
      "cuMemcpyDtoDAsync");
}

void gather(const gpu::Context& context, Stream stream, Segments from, std::size_t at,
            std::byte* to, std::size_t bytes) {
  for_each_run(from, at, bytes, [&](std::byte* run, std::size_t before, std::size_t length) {
    copy(context, stream, to + before, run, length);
  });
}

void scatter(const gpu::Context& context, Stream stream, const std::byte* from, Segments to,
             std::size_t at, std::size_t bytes) {
  for_each_run(to, at, bytes, [&](std::byte* run, std::size_t before, std::size_t length) {
    copy(context, stream, run, from + before, length);
  });
}

}  // namespace polyhvd::nccl
