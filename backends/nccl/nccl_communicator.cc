#include "nccl/nccl_communicator.h"

#include <algorithm>
#include <cstring>

#include "engine/segments.h"

namespace polyhvd::nccl {
namespace {

// Whether the parts of all members follow each other in memory, and are equally long.
bool is_even_piece(Segments parts) {
  for (std::size_t i = 1; i < parts.size(); ++i) {
    if (parts[i - 1].data + parts[i - 1].bytes != parts[i].data) return false;
    if (parts[i - 1].bytes != parts[i].bytes) return false;
  }
  return true;
}

}  // namespace

NcclCommunicator::NcclCommunicator(Resources& resources, ProcessSetId set,
                                   std::span<const int> members, Communicator& on_cpu,
                                   std::unique_ptr<Communicator> staged,
                                   std::unique_ptr<Hierarchy> hierarchy)
    : resources_(resources),
      set_(set),
      members_(members.begin(), members.end()),
      size_(members.size()),
      on_cpu_(on_cpu),
      staged_(std::move(staged)),
      hierarchy_(std::move(hierarchy)) {
  self_ = static_cast<std::size_t>(*position_in(members, resources.rank));
}

// Which way ---------------------------------------------------------------------------------

void NcclCommunicator::begin(Device device, std::span<const DeviceEventPtr> ready,
                             Deadline deadline) {
  device_ = device;
  ready_.assign(ready.begin(), ready.end());
  deadline_ = deadline;
  patience_ = deadline - GpuStreamGroup::Clock::now();
  is_staged_ = false;
}

bool NcclCommunicator::serves(Deadline deadline) {
  if (!serves_) serves_ = decide(deadline);
  return *serves_;
}

bool NcclCommunicator::takes_streams(Deadline deadline) {
  if (!serves(deadline)) return false;
  if (!streams_) streams_ = connect(members_, deadline);
  streams_->join_batch(ready_);
  return true;
}

Communicator& NcclCommunicator::staged() {
  if (!std::exchange(is_staged_, true)) staged_->begin(device_, ready_, deadline_);
  return *staged_;
}

// A batch with several dtypes may have gone several ways.
DeviceEventPtr NcclCommunicator::end() {
  ready_.clear();
  DeviceEventPtr end = is_staged_ ? staged_->end() : nullptr;
  for (GpuStreamGroup* streams : {streams_here_.get(), streams_.get()}) {
    if (streams == nullptr || !streams->in_batch()) continue;
    if (end) streams->hold({&end, 1});
    end = streams->end_batch(patience_);
  }
  return end;
}

void NcclCommunicator::check() {
  staged_->check();
  if (hierarchy_) hierarchy_->check();
  for (GpuStreamGroup* streams : {streams_here_.get(), streams_.get()}) {
    if (streams != nullptr) streams->check();
  }
}

void NcclCommunicator::finish() noexcept {
  for (GpuStreamGroup* streams : {streams_here_.get(), streams_.get()}) {
    if (streams != nullptr) streams->finish();
  }
}

bool NcclCommunicator::is_working() noexcept {
  return (streams_here_ && streams_here_->is_working()) || (streams_ && streams_->is_working());
}

void NcclCommunicator::abort() noexcept {
  staged_->abort();
  if (hierarchy_) hierarchy_->abort();
  for (GpuStreamGroup* streams : {streams_here_.get(), streams_.get()}) {
    if (streams != nullptr) streams->abort();
  }
}

std::optional<LibraryReduction> NcclCommunicator::reduction_by_nccl(DType dtype, ReduceOp op,
                                                                    Scale scale) const {
  if (resources_.settings.reproducible) return std::nullopt;
  return reduction_of(dtype, op, scale);
}

// Connecting --------------------------------------------------------------------------------

Offer NcclCommunicator::offer() const {
  Offer offer;
  try {
    const gpu::ContextPtr context = resources_.devices().context(device_);
    put(offer.gpu, context->driver().uuid_of(device_.index));
    offer.version = resources_.library()->version();
    offer.shares_gpus = resources_.settings.shares_gpus ? 1 : 0;
  } catch (const Failure& failure) {
    put(offer.reason, failure.what());
  }
  return offer;
}

// All members draw the same conclusion from the same offers.
bool NcclCommunicator::decide(Deadline deadline) {
  const Offer mine = offer();
  std::vector<Offer> offers(size_);
  const std::vector<std::size_t> counts(size_, sizeof(Offer));
  on_cpu_.allgather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(offers)),
                    counts, deadline);
  const auto reason = objection(offers, [this](std::size_t i) { return member(i); });
  if (reason && resources_.settings.required) {
    throw Failure(ErrorCode::kInvalidArgument,
                  "POLYHVD_BACKENDS requires nccl, which cannot be used for " + label(members_) +
                      ": " + *reason);
  }
  if (reason && self_ == 0 && size_ > 1) {
    resources_.warn(
        "tensors on GPUs are transferred through host memory, which is slower than NCCL: " +
        *reason + "; POLYHVD_BACKENDS=host disables this message");
  }
  if (!reason && self_ == 0 && set_ == 0 && resources_.settings.hierarchical && !hierarchy_) {
    resources_.warn(
        "POLYHVD_HIERARCHICAL_ALLREDUCE has no effect: it needs several hosts with the same number "
        "of ranks, at least two on each; NCCL connects all ranks instead");
  }
  return !reason;
}

// All members call it, each with the ranks that it is one of; the first of them invites the rest.
std::unique_ptr<GpuStreamGroup> NcclCommunicator::connect(std::span<const int> ranks,
                                                          Deadline deadline) {
  struct Invitation {
    UniqueId id;
    Result result;
  } mine{};
  const auto library = resources_.library();
  if (ranks[0] == resources_.rank) mine.result = library->call.GetUniqueId(&mine.id);
  std::vector<Invitation> all(size_);
  const std::vector<std::size_t> counts(size_, sizeof(Invitation));
  on_cpu_.allgather(std::as_bytes(std::span(&mine, 1)), std::as_writable_bytes(std::span(all)),
                    counts, deadline);
  for (std::size_t i = 0; i < size_; ++i) {
    library->check(i == self_ ? "ncclGetUniqueId" : "ncclGetUniqueId of another rank",
                   all[i].result);
  }
  const auto first = static_cast<std::size_t>(*position_in(members_, ranks[0]));
  const gpu::ContextPtr context = resources_.devices().context(device_);
  return std::make_unique<GpuStreamGroup>(
      library, label(ranks), context, resources_.stream(context), resources_.parking, all[first].id,
      static_cast<int>(ranks.size()), *position_in(ranks, resources_.rank), deadline);
}

std::string NcclCommunicator::member(std::size_t position) const {
  const int rank = members_[position];
  return "rank " + std::to_string(rank) + " (" + resources_.name_of(rank) + ")";
}

std::string NcclCommunicator::label(std::span<const int> ranks) const {
  constexpr std::size_t kRanksShown = 16;
  std::string shown;
  for (std::size_t i = 0; i < std::min(ranks.size(), kRanksShown); ++i) {
    shown += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  }
  if (ranks.size() > kRanksShown) shown += ", ...";
  return member(self_) + " in process set " + std::to_string(set_) + " of ranks " + shown;
}

// Reducing ----------------------------------------------------------------------------------

void NcclCommunicator::allreduce(Segments in, Segments out, DType dtype, ReduceOp op, Scale scale,
                                 Deadline deadline) {
  const std::size_t bytes = total_bytes(in);
  if (bytes == 0) return;
  const auto reduction = reduction_by_nccl(dtype, op, scale);
  if (!reduction || !serves(deadline)) {
    return staged().allreduce(in, out, dtype, op, scale, deadline);
  }
  resources_.count(bytes);
  if (hierarchy_) return allreduce_by_levels(in, out, dtype, op, *reduction, deadline);
  takes_streams(deadline);
  const auto is_small = [](const Segment& s) { return s.bytes > 0 && FusionBuffer::takes(s); };
  const bool packs =
      static_cast<std::size_t>(std::ranges::count_if(in, is_small)) >= kPackedSegmentsMin;
  const Operation operation(streams_->connection(), *reduction);
  const std::size_t item = item_size(dtype);
  streams_->launch("an allreduce", deadline, [&] {
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (in[i].bytes == 0 || (packs && is_small(in[i]))) continue;
      streams_->connection().check(
          "ncclAllReduce",
          streams_->call().AllReduce(in[i].data, out[i].data, in[i].bytes / item, reduction->type,
                                     operation.get(), streams_->comm(), streams_->stream()));
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
                                        const LibraryReduction& reduction, RedOp op,
                                        Deadline deadline) {
  const FusionBuffer& buffer = streams_->fusion_buffer();
  for (std::size_t next = 0; next < in.size();) {
    const auto [count, bytes] = buffer.pack(streams_->stream(), in.subspan(next), buffer.bytes());
    streams_->launch("an allreduce", deadline, [&] {
      streams_->connection().check(
          "ncclAllReduce",
          streams_->call().AllReduce(buffer.data(), buffer.data(), bytes / item_size(dtype),
                                     reduction.type, op, streams_->comm(), streams_->stream()));
    });
    buffer.unpack(streams_->stream(), out.subspan(next, count));
    next += count;
  }
}

void NcclCommunicator::allreduce_by_levels(Segments in, Segments out, DType dtype, ReduceOp op,
                                           const LibraryReduction& reduction, Deadline deadline) {
  if (!streams_here_) streams_here_ = connect(hierarchy_->here(), deadline);
  streams_here_->join_batch(ready_);
  // The path by the CPUs is one, and begins again.
  if (const DeviceEventPtr staged = is_staged_ ? staged_->end() : nullptr) {
    streams_here_->hold({&staged, 1});
  }
  hierarchy_->allreduce(*streams_here_, device_, in, out, dtype, op, reduction, deadline);
}

void NcclCommunicator::reducescatter(Segments in, Segments out, Counts counts, DType dtype,
                                     ReduceOp op, Scale scale, Deadline deadline) {
  if (std::ranges::max(counts) == 0) return;
  const auto reduction = reduction_by_nccl(dtype, op, scale);
  if (!reduction || !takes_streams(deadline)) {
    return staged().reducescatter(in, out, counts, dtype, op, scale, deadline);
  }
  resources_.count(total_bytes(in));
  const Operation operation(streams_->connection(), *reduction);
  std::vector<std::size_t> direct;
  std::vector<std::size_t> packed;
  for (std::size_t i = 0; i < out.size(); ++i) {
    const bool is_alone = out.size() == 1 || !FusionBuffer::takes(in[i]);
    const bool is_direct = is_alone && is_even_piece(picked(in, out.size(), {&i, 1}));
    (is_direct ? direct : packed).push_back(i);
  }
  const std::size_t item = item_size(dtype);
  streams_->launch("a reducescatter", deadline, [&] {
    for (const std::size_t i : direct) {
      streams_->connection().check(
          "ncclReduceScatter", streams_->call().ReduceScatter(
                                   in[i].data, out[i].data, out[i].bytes / item, reduction->type,
                                   operation.get(), streams_->comm(), streams_->stream()));
    }
  });
  if (packed.empty()) return;
  const std::vector<Segment> from = picked(in, out.size(), packed);
  std::vector<std::size_t> packed_counts;
  for (std::size_t m = 0; m < size_; ++m) {
    packed_counts.push_back(total_bytes(Segments(from).subspan(m * packed.size(), packed.size())));
  }
  reducescatter_packed(from, picked(out, out.size(), packed), packed_counts, item, *reduction,
                       operation.get(), deadline);
}

// Of the tensors at `which`, the segments for every member.
std::vector<Segment> NcclCommunicator::picked(Segments all, std::size_t tensors,
                                              std::span<const std::size_t> which) {
  std::vector<Segment> segments;
  for (std::size_t first = 0; first < all.size(); first += tensors) {
    for (const std::size_t i : which) segments.push_back(all[first + i]);
  }
  return segments;
}

// NCCL wants all parts equally long and in one piece. They are laid out so, as much as fits at a
// time; behind shorter parts lies what was there before, and its sum is not used.
void NcclCommunicator::reducescatter_packed(Segments in, Segments out, Counts counts,
                                            std::size_t item, const LibraryReduction& reduction,
                                            RedOp op, Deadline deadline) {
  FusionBuffer& buffer = streams_->fusion_buffer();
  const std::size_t longest = std::ranges::max(counts);
  const std::size_t fitting =
      buffer.bytes() / (size_ + 1) / FusionBuffer::kAlignment * FusionBuffer::kAlignment;
  const std::size_t parts = out.size();
  for (std::size_t at = 0; at < longest; at += fitting) {
    const std::size_t room = std::min(fitting, longest - at);
    const auto piece = [&](std::size_t m) {
      return at >= counts[m] ? 0 : std::min(room, counts[m] - at);
    };
    for (std::size_t m = 0; m < size_; ++m) {
      gather(streams_->context(), streams_->stream(), in.subspan(m * parts, parts), at,
             buffer.data() + m * room, piece(m));
    }
    std::byte* const result = buffer.data() + size_ * fitting;
    streams_->launch("a reducescatter", deadline, [&] {
      streams_->connection().check(
          "ncclReduceScatter",
          streams_->call().ReduceScatter(buffer.data(), result, room / item, reduction.type, op,
                                         streams_->comm(), streams_->stream()));
    });
    scatter(streams_->context(), streams_->stream(), result, out, at, piece(self_));
  }
}

}  // namespace polyhvd::nccl
