#include "nccl/hierarchy.h"

#include <algorithm>
#include <map>

namespace polyhvd::nccl {

std::optional<Levels> levels_of(std::span<const int> members, int rank,
                                const std::function<int(int rank)>& host_of) {
  std::map<int, std::vector<int>> by_host;
  for (const int member : members) by_host[host_of(member)].push_back(member);
  Levels levels;
  levels.here = by_host.at(host_of(rank));
  const std::size_t size = levels.here.size();
  const auto is_alike = [&](const auto& host) { return host.second.size() == size; };
  if (by_host.size() == 1 || size == 1 || !std::ranges::all_of(by_host, is_alike)) {
    return std::nullopt;
  }
  levels.place = static_cast<std::size_t>(*position_in(levels.here, rank));
  for (const auto& [host, ranks] : by_host) levels.across.push_back(ranks[levels.place]);
  std::ranges::sort(levels.across);
  return levels;
}

// A tensor's end that does not divide by the ranks here is packed with small tensors.
void Hierarchy::allreduce(GpuStreamGroup& streams, Device device, Segments in, Segments out,
                          DType dtype, ReduceOp op, const LibraryReduction& reduction,
                          Deadline deadline) {
  const Operation operation(streams.connection(), reduction);
  const Step step{device, dtype, op, reduction.type, operation.get(), deadline};
  const std::size_t unit = ranks_here() * FusionBuffer::kAlignment;
  std::vector<Piece> pieces;
  std::vector<Segment> rest_in, rest_out;
  for (std::size_t i = 0; i < in.size(); ++i) {
    const std::size_t whole = FusionBuffer::takes(in[i]) ? 0 : in[i].bytes / unit * unit;
    if (whole > 0) pieces.push_back({in[i].data, out[i].data, whole});
    if (whole == in[i].bytes) continue;
    rest_in.push_back({in[i].data + whole, in[i].bytes - whole});
    rest_out.push_back({out[i].data + whole, out[i].bytes - whole});
  }
  for (std::size_t next = 0; next < rest_in.size() || !pieces.empty(); pieces.clear()) {
    FusionBuffer::Packed packed;
    if (next < rest_in.size()) {
      FusionBuffer& buffer = streams.fusion_buffer();
      packed = buffer.pack(streams.stream(), Segments(rest_in).subspan(next),
                           buffer.bytes() / unit * unit);
      pieces.push_back({buffer.data(), buffer.data(), (packed.bytes + unit - 1) / unit * unit});
    }
    reduce(streams, pieces, step);
    if (packed.count == 0) continue;
    streams.fusion_buffer().unpack(streams.stream(),
                                   Segments(rest_out).subspan(next, packed.count));
    next += packed.count;
  }
}

void Hierarchy::reduce(GpuStreamGroup& streams, std::span<const Piece> pieces, const Step& step) {
  const std::size_t item = item_size(step.dtype);
  std::vector<Segment> own;
  for (const Piece& piece : pieces) {
    const std::size_t bytes = piece.bytes / ranks_here();
    own.push_back({piece.out + levels_.place * bytes, bytes});
  }
  streams.launch("the first step of an allreduce", step.deadline, [&] {
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      streams.connection().check(
          "ncclReduceScatter",
          streams.call().ReduceScatter(pieces[i].in, own[i].data, own[i].bytes / item, step.type,
                                       step.nccl_op, streams.comm(), streams.stream()));
    }
  });
  const DeviceEventPtr reduced = streams.mark();
  staged_->begin(step.device, {&reduced, 1}, step.deadline);
  staged_->allreduce(own, own, step.dtype, step.op, {}, step.deadline);
  const DeviceEventPtr delivered = staged_->end();
  streams.hold({&delivered, 1});
  streams.launch("the last step of an allreduce", step.deadline, [&] {
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      streams.connection().check(
          "ncclAllGather",
          streams.call().AllGather(own[i].data, pieces[i].out, own[i].bytes, DataType::kUint8,
                                   streams.comm(), streams.stream()));
    }
  });
}

}  // namespace polyhvd::nccl
