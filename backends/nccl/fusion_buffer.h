// Memory on the GPU in which small tensors travel as one, and the stream that fills it.
#pragma once

#include <cstddef>
#include <memory>

#include "control/types.h"
#include "gpu/driver.h"
#include "nccl/connection.h"

namespace polyhvd::nccl {

// Of one communicator, registered with it where NCCL can do that. Used in the order of one
// stream, so that a piece is never overwritten before it has been read.
class FusionBuffer {
 public:
  static constexpr std::size_t kBytes = 16 << 20;
  static constexpr std::size_t kAlignment = 128;  // of tensors that are packed, for wide loads
  // An operation on less takes a time that does not depend on its size, and a group of many takes
  // that time again and again; two copies within the GPU take less. Above, copies would cost more
  // than they save.
  static bool takes(const Segment& tensor) noexcept { return tensor.bytes <= 64 << 10; }

  FusionBuffer(const Connection& connection, gpu::ContextPtr context);
  // When the stream is done with it, and before the connection ends.
  ~FusionBuffer();
  FusionBuffer(const FusionBuffer&) = delete;
  FusionBuffer& operator=(const FusionBuffer&) = delete;

  std::byte* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return kBytes; }
  struct Packed {
    std::size_t count = 0;  // of the tensors, the first ones
    std::size_t bytes = 0;  // of the buffer, a multiple of kAlignment
  };
  // Gives the stream copies of as many tensors as fit into `room` bytes, and back.
  Packed pack(Stream stream, Segments from, std::size_t room) const;
  void unpack(Stream stream, Segments to) const;
  // Leaves the memory to the end of the process: the GPU may still use it.
  void leave() noexcept { left_ = true; }

 private:
  const Connection& connection_;
  gpu::ContextPtr context_;
  std::byte* data_ = nullptr;
  std::shared_ptr<std::byte> plain_;  // where NCCL does not allocate
  void* registration_ = nullptr;
  bool left_ = false;
};

// Gives the stream a copy within the GPU.
void copy(const gpu::Context& context, Stream stream, std::byte* to, const std::byte* from,
          std::size_t bytes);
// Bytes [at, at + bytes) of what the segments hold one after the other, to or from one place.
void gather(const gpu::Context& context, Stream stream, Segments from, std::size_t at,
            std::byte* to, std::size_t bytes);
void scatter(const gpu::Context& context, Stream stream, const std::byte* from, Segments to,
             std::size_t at, std::size_t bytes);

}  // namespace polyhvd::nccl
