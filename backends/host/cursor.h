// Walks the segments of a fused operation as one run of bytes, in pieces that
// are contiguous in memory, inputs and outputs side by side.
#pragma once

#include <algorithm>
#include <cstddef>

#include "engine/segments.h"
#include "host/copy.h"
#include "host/staged/staging_writer.h"

namespace polyhvd::host {

// Outputs that were not read are in no cache, and a plain store fetches each line first.
// So many bytes of them are gone from the caches before anybody looks.
inline constexpr std::size_t kOutputsPastCachesMin = 4 << 20;

class Cursor {
 public:
  // `in` and `out` are cut in the same way, and outlive the cursor.
  Cursor(Segments in, Segments out, std::size_t at = 0) : in_(in), out_(out) { skip(at); }

  // From now on outputs are written past the caches.
  void pass_caches() noexcept { passes_caches_ = true; }
  bool passes_caches() const noexcept { return passes_caches_; }

  // Calls use(in, out, offset, count) for the pieces of the next `bytes` bytes;
  // `offset` counts from the present position.
  template <class Use>
  void take(std::size_t bytes, Use&& use) {
    std::size_t done = 0;
    while (done < bytes) {
      const std::size_t count = std::min(bytes - done, in_[index_].bytes - offset_);
      if (count > 0) use(in_[index_].data + offset_, out_[index_].data + offset_, done, count);
      done += count;
      offset_ += count;
      if (offset_ == in_[index_].bytes) {
        ++index_;
        offset_ = 0;
      }
    }
  }

  // The next `bytes` bytes of the inputs, or of the outputs, if they lie in one piece; else null.
  const std::byte* input_run(std::size_t bytes) const noexcept {
    return is_in_one_piece(bytes) ? in_[index_].data + offset_ : nullptr;
  }
  std::byte* output_run(std::size_t bytes) const noexcept {
    return is_in_one_piece(bytes) ? out_[index_].data + offset_ : nullptr;
  }

  void copy_inputs_to(std::byte* target, std::size_t bytes) {
    take(bytes, [target](const std::byte* in, std::byte*, std::size_t offset, std::size_t count) {
      copy_bytes(target + offset, in, count);
    });
  }

  void stage_inputs(StagingWriter& writer, std::byte* target, std::size_t bytes) {
    take(bytes, [&](const std::byte* in, std::byte*, std::size_t offset, std::size_t count) {
      writer.write(target + offset, in, count);
    });
  }

  void copy_to_outputs(const std::byte* source, std::size_t bytes) {
    take(bytes, [&](const std::byte*, std::byte* out, std::size_t offset, std::size_t count) {
      const bool past = passes_caches_ && count >= StagingWriter::kBytesMin;
      past ? copy_past_caches(out, source + offset, count)
           : copy_bytes(out, source + offset, count);
    });
  }

  void skip(std::size_t bytes) {
    take(bytes, [](std::byte*, std::byte*, std::size_t, std::size_t) {});
  }

 private:
  bool is_in_one_piece(std::size_t bytes) const noexcept {
    return index_ < in_.size() && bytes <= in_[index_].bytes - offset_;
  }

  Segments in_;
  Segments out_;
  std::size_t index_ = 0;
  std::size_t offset_ = 0;
  bool passes_caches_ = false;
};

}  // namespace polyhvd::host
