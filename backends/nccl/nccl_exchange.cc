// The collectives that move bytes and reduce nothing.
#include <algorithm>

#include "engine/segments.h"
#include "nccl/nccl_communicator.h"

namespace polyhvd::nccl {
// Tensors that are small on every rank travel as one.
void NcclCommunicator::allgather(Segments in, Segments out, Counts counts, Deadline deadline) {
  if (std::ranges::max(counts) == 0) return;
  if (!takes_streams(deadline)) return staged().allgather(in, out, counts, deadline);
  resources_.count(total_bytes(in));
  std::vector<std::size_t> small;
  std::vector<std::size_t> others;
  for (std::size_t i = 0; i < in.size(); ++i) {
    bool is_small = true;
    for (std::size_t m = 0; m < size_; ++m) {
      is_small = is_small && FusionBuffer::takes(out[m * in.size() + i]);
    }
    (is_small ? small : others).push_back(i);
  }
  const bool packs = small.size() >= kPackedSegmentsMin;
  if (!packs) others.insert(others.end(), small.begin(), small.end());
  streams_->launch("an allgather", deadline, [&] {
    for (const std::size_t i : others) gather_one(in[i], picked(out, in.size(), {&i, 1}));
  });
  if (!packs) return;
  allgather_packed(picked(in, in.size(), small), picked(out, in.size(), small), deadline);
}

void NcclCommunicator::gather_one(const Segment& in, Segments parts) const {
  const auto same_length = [&](const Segment& part) { return part.bytes == in.bytes; };
  if (std::ranges::all_of(parts, same_length)) {
    if (in.bytes == 0) return;
    return streams_->connection().check(
        "ncclAllGather",
        streams_->call().AllGather(in.data, parts[0].data, in.bytes, DataType::kUint8,
                                   streams_->comm(), streams_->stream()));
  }
  for (std::size_t m = 0; m < size_; ++m) {
    if (parts[m].bytes == 0) continue;
    streams_->connection().check(
        "ncclBroadcast",
        streams_->call().Broadcast(m == self_ ? in.data : parts[m].data, parts[m].data,
                                   parts[m].bytes, DataType::kUint8, static_cast<int>(m),
                                   streams_->comm(), streams_->stream()));
  }
}

// Behind shorter parts lies what was there before, as in reducescatter_packed.
void NcclCommunicator::allgather_packed(Segments in, Segments out, Deadline deadline) {
  FusionBuffer& buffer = streams_->fusion_buffer();
  const auto part = [&](std::size_t m) { return out.subspan(m * in.size(), in.size()); };
  std::vector<std::size_t> counts(size_);
  for (std::size_t m = 0; m < size_; ++m) counts[m] = total_bytes(part(m));
  const std::size_t longest = std::ranges::max(counts);
  const std::size_t fitting =
      buffer.bytes() / size_ / FusionBuffer::kAlignment * FusionBuffer::kAlignment;
  for (std::size_t at = 0; at < longest; at += fitting) {
    const std::size_t room = std::min(fitting, longest - at);
    const auto piece = [&](std::size_t m) {
      return at >= counts[m] ? 0 : std::min(room, counts[m] - at);
    };
    std::byte* const own = buffer.data() + self_ * room;
    gather(streams_->context(), streams_->stream(), in, at, own, piece(self_));
    streams_->launch("an allgather", deadline, [&] {
      streams_->connection().check(
          "ncclAllGather", streams_->call().AllGather(own, buffer.data(), room, DataType::kUint8,
                                                      streams_->comm(), streams_->stream()));
    });
    for (std::size_t m = 0; m < size_; ++m) {
      scatter(streams_->context(), streams_->stream(), buffer.data() + m * room, part(m), at,
              piece(m));
    }
  }
}

void NcclCommunicator::broadcast(Segments in, Segments out, int root, Deadline deadline) {
  const std::size_t bytes = total_bytes(out);
  if (bytes == 0) return;
  if (!takes_streams(deadline)) return staged().broadcast(in, out, root, deadline);
  const bool is_root = static_cast<int>(self_) == root;
  resources_.count(is_root ? bytes : 0);
  streams_->launch("a broadcast", deadline, [&] {
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (out[i].bytes == 0) continue;
      const std::byte* const from = is_root ? in[i].data : out[i].data;
      streams_->connection().check(
          "ncclBroadcast",
          streams_->call().Broadcast(from, out[i].data, out[i].bytes, DataType::kUint8, root,
                                     streams_->comm(), streams_->stream()));
    }
  });
}

void NcclCommunicator::alltoall(ConstBytes in, Bytes out, Counts counts, Deadline deadline) {
  if (std::ranges::max(counts) == 0) return;
  if (!takes_streams(deadline)) return staged().alltoall(in, out, counts, deadline);
  resources_.count(in.size());
  const std::byte* own_from = nullptr;
  std::byte* own_to = nullptr;
  streams_->launch("an alltoall", deadline, [&] {
    const std::byte* from = in.data();
    std::byte* to = out.data();
    for (std::size_t m = 0; m < size_; ++m) {
      const std::size_t sent = counts[self_ * size_ + m];
      const std::size_t received = counts[m * size_ + self_];
      if (m == self_) {
        own_from = from, own_to = to;
      } else {
        send_and_receive(static_cast<int>(m), {from, sent}, {to, received});
      }
      from += sent;
      to += received;
    }
  });
  copy(streams_->context(), streams_->stream(), own_to, own_from, counts[self_ * size_ + self_]);
}

// Both ends know of a part without bytes, and leave it out.
void NcclCommunicator::send_and_receive(int peer, ConstBytes out, Bytes in) const {
  if (!out.empty()) {
    streams_->connection().check(
        "ncclSend", streams_->call().Send(out.data(), out.size(), DataType::kUint8, peer,
                                          streams_->comm(), streams_->stream()));
  }
  if (!in.empty()) {
    streams_->connection().check("ncclRecv",
                                 streams_->call().Recv(in.data(), in.size(), DataType::kUint8, peer,
                                                       streams_->comm(), streams_->stream()));
  }
}

}  // namespace polyhvd::nccl
