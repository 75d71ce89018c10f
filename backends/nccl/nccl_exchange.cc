// The collectives that move bytes and reduce nothing.
#include <algorithm>

#include "nccl/nccl_communicator.h"
#include "segments.h"

namespace polyhvd::nccl {
void NcclCommunicator::allgather(ConstBytes in, Bytes out, Counts counts, Deadline deadline) {
  if (std::ranges::max(counts) == 0) return;
  if (!takes_lane(deadline)) return staged().allgather(in, out, counts, deadline);
  fabric_.count(in.size());
  lane_->launch("an allgather", deadline, [&] {
    if (are_equal(counts)) {
      return lane_->connection().check(
          "ncclAllGather",
          lane_->call().AllGather(in.data(), out.data(), in.size(), DataType::kUint8, lane_->comm(),
                                  lane_->stream()));
    }
    std::byte* part = out.data();
    for (std::size_t m = 0; m < size_; ++m) {
      const std::byte* const from = m == self_ ? in.data() : part;
      if (counts[m] > 0) {
        lane_->connection().check(
            "ncclBroadcast",
            lane_->call().Broadcast(from, part, counts[m], DataType::kUint8, static_cast<int>(m),
                                    lane_->comm(), lane_->stream()));
      }
      part += counts[m];
    }
  });
}

void NcclCommunicator::broadcast(Segments in, Segments out, int root, Deadline deadline) {
  const std::size_t bytes = total_bytes(out);
  if (bytes == 0) return;
  if (!takes_lane(deadline)) return staged().broadcast(in, out, root, deadline);
  const bool is_root = static_cast<int>(self_) == root;
  fabric_.count(is_root ? bytes : 0);
  lane_->launch("a broadcast", deadline, [&] {
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (out[i].bytes == 0) continue;
      const std::byte* const from = is_root ? in[i].data : out[i].data;
      lane_->connection().check(
          "ncclBroadcast",
          lane_->call().Broadcast(from, out[i].data, out[i].bytes, DataType::kUint8, root,
                                  lane_->comm(), lane_->stream()));
    }
  });
}

void NcclCommunicator::alltoall(ConstBytes in, Bytes out, Counts counts, Deadline deadline) {
  if (std::ranges::max(counts) == 0) return;
  if (!takes_lane(deadline)) return staged().alltoall(in, out, counts, deadline);
  fabric_.count(in.size());
  const std::byte* own_from = nullptr;
  std::byte* own_to = nullptr;
  lane_->launch("an alltoall", deadline, [&] {
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
  copy(lane_->context(), lane_->stream(), own_to, own_from, counts[self_ * size_ + self_]);
}

// Both ends know of a part without bytes, and leave it out.
void NcclCommunicator::send_and_receive(int peer, ConstBytes out, Bytes in) const {
  if (!out.empty()) {
    lane_->connection().check("ncclSend",
                              lane_->call().Send(out.data(), out.size(), DataType::kUint8, peer,
                                                 lane_->comm(), lane_->stream()));
  }
  if (!in.empty()) {
    lane_->connection().check("ncclRecv", lane_->call().Recv(in.data(), in.size(), DataType::kUint8,
                                                             peer, lane_->comm(), lane_->stream()));
  }
}

}  // namespace polyhvd::nccl
