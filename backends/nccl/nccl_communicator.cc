#include "nccl/nccl_communicator.h"

#include <algorithm>
#include <cstring>

#include "segments.h"

namespace polyhvd::nccl {
namespace {

// An allreduce of less takes a time that does not depend on its size, and a group of many takes
// that time again and again; two copies within the GPU take less. Above, copies would cost more
// than they save.
constexpr std::size_t kPackedBytesMax = 64 << 10;
constexpr std::size_t kPackedSegmentsMin = 3;
constexpr std::size_t kFusionBytes = 16 << 20;
constexpr std::size_t kAlignment = 128;  // of tensors that are packed, for wide loads

std::size_t aligned(std::size_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Whether the parts of all members follow each other in memory.
bool is_one_piece(Segments parts) {
  for (std::size_t i = 1; i < parts.size(); ++i) {
    if (parts[i - 1].data + parts[i - 1].bytes != parts[i].data) return false;
  }
  return true;
}

}  // namespace

NcclCommunicator::NcclCommunicator(Fabric& fabric, ProcessSetId set, std::span<const int> members,
                                   Communicator& on_cpu, std::unique_ptr<Communicator> staged)
    : fabric_(fabric),
      set_(set),
      members_(members.begin(), members.end()),
      size_(members.size()),
      on_cpu_(on_cpu),
      staged_(std::move(staged)) {
  self_ = static_cast<std::size_t>(*position_in(members, fabric.rank));
}

// Which way ---------------------------------------------------------------------------------

void NcclCommunicator::begin(Device device, std::span<const DeviceEventPtr> ready,
                             Deadline deadline) {
  device_ = device;
  ready_.assign(ready.begin(), ready.end());
  deadline_ = deadline;
  patience_ = deadline - Lane::Clock::now();
  on_lane_ = is_staged_ = false;
}

bool NcclCommunicator::takes_lane(Deadline deadline) {
  if (!decided_) connect(deadline);
  if (!lane_) return false;
  if (!std::exchange(on_lane_, true)) lane_->hold(ready_);
  return true;
}

Communicator& NcclCommunicator::staged() {
  if (!std::exchange(is_staged_, true)) staged_->begin(device_, ready_, deadline_);
  return *staged_;
}

// A batch with several dtypes may have gone both ways.
DeviceEventPtr NcclCommunicator::end() {
  ready_.clear();
  const DeviceEventPtr staged = is_staged_ ? staged_->end() : nullptr;
  if (!on_lane_) return staged;
  if (staged) lane_->hold({&staged, 1});
  return lane_->end_batch(patience_);
}

void NcclCommunicator::check() {
  staged_->check();
  if (lane_) lane_->check();
}

void NcclCommunicator::abort() noexcept {
  staged_->abort();
  if (lane_) lane_->abort();
}

std::optional<Reduction> NcclCommunicator::reduction_by_nccl(DType dtype, ReduceOp op,
                                                             Scale scale) const {
  if (fabric_.settings.reproducible) return std::nullopt;
  return reduction_of(dtype, op, scale);
}

// Connecting --------------------------------------------------------------------------------

Offer NcclCommunicator::offer() const {
  Offer offer;
  try {
    const cuda::ContextPtr context = fabric_.devices().context(device_);
    put(offer.gpu, context->driver().uuid_of(device_.index));
    offer.version = fabric_.library()->version();
    offer.shares_gpus = fabric_.settings.shares_gpus ? 1 : 0;
  } catch (const Failure& failure) {
    put(offer.reason, failure.what());
  }
  return offer;
}

// What is decided here, all members decide from the same offers.
void NcclCommunicator::connect(Deadline deadline) {
  const Offer mine = offer();
  std::vector<Offer> offers(size_);
  const std::vector<std::size_t> counts(size_, sizeof(Offer));
  on_cpu_.allgather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(offers)),
                    counts, deadline);
  const auto reason = objection(offers, [this](std::size_t i) { return member(i); });
  if (reason && fabric_.settings.required) {
    throw Failure(ErrorCode::kInvalidArgument,
                  "POLYHVD_BACKENDS asks for nccl, which cannot serve " + who() + ": " + *reason);
  }
  decided_ = true;
  if (reason) {
    if (self_ == 0 && size_ > 1) {
      fabric_.warn("tensors on GPUs go through memory of the host, which is slower than NCCL: " +
                   *reason + "; with POLYHVD_BACKENDS=host this is not said");
    }
    return;
  }
  struct Invitation {
    UniqueId id;
    Result result;
  } invitation{};
  const auto library = fabric_.library();
  if (self_ == 0) invitation.result = library->call.GetUniqueId(&invitation.id);
  const Segment bytes{reinterpret_cast<std::byte*>(&invitation), sizeof invitation};
  on_cpu_.broadcast({&bytes, 1}, {&bytes, 1}, 0, deadline);
  library->check(self_ == 0 ? "ncclGetUniqueId" : "ncclGetUniqueId of the first rank",
                 invitation.result);
  const cuda::ContextPtr context = fabric_.devices().context(device_);
  lane_ = std::make_unique<Lane>(library, who(), context, fabric_.stream(context), fabric_.parking,
                                 invitation.id, static_cast<int>(size_), static_cast<int>(self_),
                                 deadline);
}

std::string NcclCommunicator::member(std::size_t position) const {
  const int rank = members_[position];
  return "rank " + std::to_string(rank) + " (" + fabric_.name_of(rank) + ")";
}

std::string NcclCommunicator::who() const {
  constexpr std::size_t kRanksShown = 16;
  std::string ranks;
  for (std::size_t i = 0; i < std::min(size_, kRanksShown); ++i) {
    ranks += (i > 0 ? ", " : "") + std::to_string(members_[i]);
  }
  if (size_ > kRanksShown) ranks += ", ...";
  return member(self_) + " in process set " + std::to_string(set_) + " of ranks " + ranks;
}

// Reducing ----------------------------------------------------------------------------------

void NcclCommunicator::allreduce(Segments in, Segments out, DType dtype, ReduceOp op, Scale scale,
                                 Deadline deadline) {
  const std::size_t bytes = total_bytes(in);
  if (bytes == 0) return;
  const auto reduction = reduction_by_nccl(dtype, op, scale);
  if (!reduction || !takes_lane(deadline)) {
    return staged().allreduce(in, out, dtype, op, scale, deadline);
  }
  fabric_.count(bytes);
  const auto is_small = [](const Segment& s) { return s.bytes > 0 && s.bytes <= kPackedBytesMax; };
  const bool packs =
      static_cast<std::size_t>(std::ranges::count_if(in, is_small)) >= kPackedSegmentsMin;
  const Operation operation(lane_->connection(), *reduction);
  const std::size_t item = item_size(dtype);
  lane_->launch("an allreduce", deadline, [&] {
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (in[i].bytes == 0 || (packs && is_small(in[i]))) continue;
      lane_->connection().check(
          "ncclAllReduce",
          lane_->call().AllReduce(in[i].data, out[i].data, in[i].bytes / item, reduction->type,
                                  operation.get(), lane_->comm(), lane_->stream()));
    }
  });
  if (!packs) return;
  std::vector<Segment> small_in, small_out;
  for (std::size_t i = 0; i < in.size(); ++i) {
    if (!is_small(in[i])) continue;
    small_in.push_back(in[i]);
    small_out.push_back(out[i]);
  }
  allreduce_packed(small_in, small_out, dtype, *reduction, operation.get(), deadline);
}

void NcclCommunicator::allreduce_packed(Segments in, Segments out, DType dtype,
                                        const Reduction& reduction, RedOp op, Deadline deadline) {
  FusionBuffer& buffer = lane_->fusion_buffer(kFusionBytes);
  for (std::size_t next = 0; next < in.size();) {
    const std::size_t first = next;
    std::size_t used = 0;
    for (; next < in.size() && used + in[next].bytes <= buffer.bytes(); ++next) {
      copy(lane_->context(), lane_->stream(), buffer.data() + used, in[next].data, in[next].bytes);
      used = aligned(used + in[next].bytes);
    }
    const std::size_t count = std::min(used, buffer.bytes()) / item_size(dtype);
    lane_->launch("an allreduce", deadline, [&] {
      lane_->connection().check(
          "ncclAllReduce",
          lane_->call().AllReduce(buffer.data(), buffer.data(), count, reduction.type, op,
                                  lane_->comm(), lane_->stream()));
    });
    std::size_t at = 0;
    for (std::size_t i = first; i < next; ++i) {
      copy(lane_->context(), lane_->stream(), out[i].data, buffer.data() + at, out[i].bytes);
      at = aligned(at + out[i].bytes);
    }
  }
}

void NcclCommunicator::reducescatter(Segments in, Segments out, Counts counts, DType dtype,
                                     ReduceOp op, Scale scale, Deadline deadline) {
  if (std::ranges::max(counts) == 0) return;
  const auto reduction = reduction_by_nccl(dtype, op, scale);
  if (!reduction || !takes_lane(deadline)) {
    return staged().reducescatter(in, out, counts, dtype, op, scale, deadline);
  }
  fabric_.count(total_bytes(in));
  const Operation operation(lane_->connection(), *reduction);
  const std::size_t item = item_size(dtype);
  if (out.size() != 1 || !are_equal(counts) || !is_one_piece(in)) {
    return reducescatter_packed(in, out, counts, item, *reduction, operation.get(), deadline);
  }
  lane_->launch("a reducescatter", deadline, [&] {
    lane_->connection().check(
        "ncclReduceScatter",
        lane_->call().ReduceScatter(in[0].data, out[0].data, counts[0] / item, reduction->type,
                                    operation.get(), lane_->comm(), lane_->stream()));
  });
}

// NCCL wants all parts equally long and in one piece. They are laid out so, as much as fits at a
// time; behind shorter parts lies what was there before, and nobody looks at its sum.
void NcclCommunicator::reducescatter_packed(Segments in, Segments out, Counts counts,
                                            std::size_t item, const Reduction& reduction, RedOp op,
                                            Deadline deadline) {
  FusionBuffer& buffer = lane_->fusion_buffer(kFusionBytes);
  const std::size_t longest = std::ranges::max(counts);
  const std::size_t fitting = buffer.bytes() / (size_ + 1) / kAlignment * kAlignment;
  const std::size_t parts = out.size();
  for (std::size_t at = 0; at < longest; at += fitting) {
    const std::size_t room = std::min(fitting, longest - at);
    const auto piece = [&](std::size_t m) {
      return at >= counts[m] ? 0 : std::min(room, counts[m] - at);
    };
    for (std::size_t m = 0; m < size_; ++m) {
      gather(lane_->context(), lane_->stream(), in.subspan(m * parts, parts), at,
             buffer.data() + m * room, piece(m));
    }
    std::byte* const result = buffer.data() + size_ * fitting;
    lane_->launch("a reducescatter", deadline, [&] {
      lane_->connection().check(
          "ncclReduceScatter",
          lane_->call().ReduceScatter(buffer.data(), result, room / item, reduction.type, op,
                                      lane_->comm(), lane_->stream()));
    });
    scatter(lane_->context(), lane_->stream(), result, out, at, piece(self_));
  }
}

}  // namespace polyhvd::nccl
