#include "host/host_communicator.h"

#include <algorithm>
#include <map>

#include "host/adasum.h"
#include "host/kernels.h"
#include "host/slices.h"

namespace polyhvd::host {
namespace {

std::vector<std::vector<int>> group_by_host(const Resources& resources,
                                            std::span<const int> members) {
  std::map<int, std::vector<int>> by_domain;
  for (std::size_t i = 0; i < members.size(); ++i) {
    by_domain[resources.domain_of[static_cast<std::size_t>(members[i])]].push_back(
        static_cast<int>(i));
  }
  std::vector<std::vector<int>> sides;
  for (auto& [domain, positions] : by_domain) sides.push_back(std::move(positions));
  return sides;
}

std::vector<int> ranks_here(const Resources& resources, std::span<const int> members) {
  std::vector<int> ranks;
  const auto domain = [&](int rank) { return resources.domain_of[static_cast<std::size_t>(rank)]; };
  for (const int rank : members) {
    if (domain(rank) == domain(resources.rank)) ranks.push_back(rank);
  }
  return ranks;
}

LocalGroup make_group(Resources& resources, const Place& place, std::span<const int> members) {
  const int domain = resources.domain_of[static_cast<std::size_t>(resources.rank)];
  const std::vector<int>& ranks_here = resources.domains[static_cast<std::size_t>(domain)];
  std::vector<int> locals;
  int self = 0;
  for (const int rank : members) {
    const auto it = std::ranges::find(ranks_here, rank);
    if (it == ranks_here.end()) continue;
    if (rank == resources.rank) self = static_cast<int>(locals.size());
    locals.push_back(static_cast<int>(it - ranks_here.begin()));
  }
  shm::Staging staging;
  if (locals.size() > 1) {
    staging =
        resources.segment->staging(static_cast<int>(place.index), static_cast<int>(locals.size()));
  }
  return LocalGroup(resources, staging, place, std::move(locals), self);
}

}  // namespace

HostCommunicator::HostCommunicator(Resources& resources, const Place& place,
                                   std::span<const int> members)
    : resources_(resources),
      members_(members.begin(), members.end()),
      sides_(group_by_host(resources, members)),
      group_(make_group(resources, place, members)),
      attached_(resources, group_, ranks_here(resources, members)) {
  chunk_bytes_ = shm::kChunkBytesMax;
  rails_ = static_cast<int>(members.size());
  for (std::size_t s = 0; s < sides_.size(); ++s) {
    const auto size = static_cast<int>(sides_[s].size());
    chunk_bytes_ = std::min(chunk_bytes_, shm::chunk_bytes(size));
    rails_ = std::min(rails_, size);
    for (const int position : sides_[s]) {
      if (rank_at(position) != resources.rank) continue;
      position_ = position;
      side_ = static_cast<int>(s);
    }
  }
  partials_.resize(hosts() > 1 ? sides_.size() : 0);
}

void HostCommunicator::allreduce(Segments in, Segments out, DType dtype, ReduceOp op, Scale scale,
                                 Deadline deadline) {
  const Reduction r{in, out, dtype, op, scale, deadline, total_bytes(in)};
  if (r.bytes == 0) return;
  if (members_.size() == 1) {
    reduce_alone(r);
  } else if (op == ReduceOp::kAdasum) {
    reduce_adasum(r);
  } else if (hosts() > 1 && resources_.reproducible) {
    reduce_in_rank_order(r);
  } else if (hosts() == 1) {
    reduce_here(r);
  } else if (members_.size() == sides_.size()) {
    is_little(r.bytes) ? swap_terms(r) : reduce_ahead(r);
  } else {
    reduce_sliced(r);
  }
}

void HostCommunicator::reduce_here(const Reduction& r) {
  if (!attached_.considers(r)) return reduce_staged(r);
  if (attached_.begin(r) == Way::kStaged || !attached_.reduce(r)) reduce_staged(r);
  attached_.end();
}

void HostCommunicator::reduce_alone(const Reduction& r) {
  const std::size_t item = item_size(r.dtype);
  for (std::size_t i = 0; i < r.in.size(); ++i) {
    const std::byte* source = r.in[i].data;
    const ReduceOp op = r.op == ReduceOp::kAdasum ? ReduceOp::kSum : r.op;
    reduce(r.dtype, op, r.scale, {&source, 1}, r.in[i].bytes / item, r.out[i].data, nullptr);
  }
}

void HostCommunicator::reduce_staged(const Reduction& r) {
  const auto ranks_here = static_cast<std::size_t>(group_.size());
  if (r.bytes * ranks_here <= resources_.tuning.direct_bytes_max &&
      r.bytes <= group_.staging().region_bytes()) {
    // Every rank reduces everything itself: one exchange instead of two, at the price of
    // reading all contributions.
    reduce_direct(r);
  } else {
    reduce_sliced(r);
  }
}

void HostCommunicator::reduce_direct(const Reduction& r) {
  const std::size_t item = item_size(r.dtype);
  const shm::Staging& staging = group_.staging();
  const std::uint64_t step = group_.step();
  group_.await_free(step, r.deadline);
  Cursor(r.in, r.out).stage_inputs(group_.writer(), staging.region(group_.self(), step), r.bytes);
  group_.publish_begun(step, r.bytes);
  attached_.is_weighing() ? attached_.meet(step, r.deadline) : group_.await_begun(step, r.deadline);
  sources_.resize(static_cast<std::size_t>(group_.size()));
  Cursor(r.in, r.out)
      .take(r.bytes,
            [&](const std::byte* in, std::byte* out, std::size_t offset, std::size_t count) {
              for (int m = 0; m < group_.size(); ++m) {
                sources_[static_cast<std::size_t>(m)] =
                    m == group_.self() ? in : staging.region(m, step) + offset;
              }
              reduce(r.dtype, r.op, r.scale, sources_, count / item, out, nullptr);
            });
  group_.advance();
}

void HostCommunicator::reduce_sliced(const Reduction& r) {
  const Slices slices(r.bytes, item_size(r.dtype), rails_, tuned_chunk_bytes());
  const int self = group_.self();
  std::vector<Cursor> staged;
  std::vector<Cursor> results;
  for (int owner = 0; owner < rails_; ++owner) {
    staged.emplace_back(r.in, r.out, slices.begin(owner));
    results.push_back(staged.back());
  }
  Cursor mine(r.in, r.out, slices.begin(std::min(self, rails_)));
  if (r.passes_caches()) {
    mine.pass_caches();
    for (Cursor& result : results) result.pass_caches();
  }
  for (std::size_t i = 0; i <= slices.steps; ++i) {
    const std::uint64_t step = group_.step();
    if (i < slices.steps) {
      stage(r, slices, i, staged);
      if (i == 0 && attached_.is_weighing()) attached_.meet(step, r.deadline);
      const std::size_t own = self < rails_ ? slices.bytes_of(self, i) : 0;
      if (own > 0) {
        group_.await_begun(step, r.deadline);
        hosts() == 1 ? reduce_own_chunk(r, mine, own) : reduce_own_chunk_across(r, mine, own);
      }
      group_.publish_reduced(step);
      group_.advance();
    }
    // One step late, so that the owners have had time to finish.
    for (int owner = 0; i > 0 && owner < rails_; ++owner) {
      if (owner == self) continue;
      const std::size_t bytes = slices.bytes_of(owner, i - 1);
      if (bytes == 0) continue;
      group_.await_reduced_by(owner, step - 1, r.deadline);
      results[static_cast<std::size_t>(owner)].copy_to_outputs(
          group_.staging().part(owner, owner, step - 1), bytes);
    }
    resources_.overlap();
  }
}

void HostCommunicator::stage(const Reduction& r, const Slices& slices, std::size_t i,
                             std::vector<Cursor>& cursors) {
  const std::uint64_t step = group_.step();
  std::size_t staged = 0;
  group_.await_free(step, r.deadline);
  for (int owner = 0; owner < rails_; ++owner) {
    if (owner == group_.self()) continue;
    const std::size_t bytes = slices.bytes_of(owner, i);
    cursors[static_cast<std::size_t>(owner)].stage_inputs(
        group_.writer(), group_.staging().part(group_.self(), owner, step), bytes);
    staged += bytes;
  }
  group_.publish_begun(step, staged);
}

void HostCommunicator::reduce_own_chunk(const Reduction& r, Cursor& mine, std::size_t bytes) {
  const std::size_t item = item_size(r.dtype);
  const shm::Staging& staging = group_.staging();
  const int self = group_.self();
  const std::uint64_t step = group_.step();
  sources_.resize(static_cast<std::size_t>(group_.size()));
  mine.take(bytes, [&](const std::byte* in, std::byte* out, std::size_t offset, std::size_t count) {
    for (int m = 0; m < group_.size(); ++m) {
      sources_[static_cast<std::size_t>(m)] = m == self ? in : staging.part(m, self, step) + offset;
    }
    std::byte* copy = staging.part(self, self, step) + offset;
    const bool apart = group_.writer().goes_past_caches(count);
    if (mine.passes_caches() && !apart) {
      reduce(r.dtype, r.op, r.scale, sources_, count / item, copy, nullptr);
      copy_past_caches(out, copy, count);
      return;
    }
    reduce(r.dtype, r.op, r.scale, sources_, count / item, out, apart ? nullptr : copy);
    if (apart) group_.writer().write(copy, out, count);
  });
}

void HostCommunicator::allgather(Segments in, Segments out, Counts counts, Deadline deadline) {
  const std::size_t parts = in.size();
  const auto block = [&](int position) { return out.subspan(index(position) * parts, parts); };
  const Segments own = block(position_);
  for (std::size_t i = 0; i < parts; ++i) {
    if (in[i].bytes > 0 && own[i].data != in[i].data) {
      copy_bytes(own[i].data, in[i].data, in[i].bytes);
    }
  }
  const std::vector<int>& here = sides_[index(side_)];
  std::vector<std::size_t> bytes;
  std::vector<Cursor> sinks;
  for (const int position : here) {
    bytes.push_back(counts[index(position)]);
    sinks.emplace_back(block(position), block(position));
  }
  group_.spread(bytes, Cursor(own, own), sinks, deadline);
  if (hosts() > 1) gather_across(out, parts, counts, deadline);
}

// The leaders swap their hosts' blocks, and hand the others' on within the host.
void HostCommunicator::gather_across(Segments out, std::size_t parts, Counts counts,
                                     Deadline deadline) {
  const auto block = [&](const std::vector<int>& side, std::size_t i) {
    return i < side.size() ? out.subspan(index(side[i]) * parts, parts) : Segments{};
  };
  const std::vector<int>& here = sides_[index(side_)];
  for (int k = 1; leads() && k < hosts(); ++k) {
    const auto& to = sides_[index(next_side(k))];
    const auto& from = sides_[index(next_side(-k))];
    for (std::size_t i = 0; i < std::max(here.size(), from.size()); ++i) {
      swap_blocks(rank_at(to[0]), block(here, i), rank_at(from[0]), block(from, i), deadline);
    }
  }
  std::vector<std::size_t> bytes(here.size(), 0);
  for (int s = 0; s < hosts(); ++s) {
    if (s == side_) continue;
    for (const int position : sides_[index(s)]) {
      const Segments b = out.subspan(index(position) * parts, parts);
      bytes[0] = counts[index(position)];
      std::vector<Cursor> sinks(here.size(), Cursor(b, b));
      group_.spread(bytes, sinks[0], sinks, deadline);
    }
  }
}

// A block in one piece is one message. One of several pieces goes in messages of one length,
// packed where they take several pieces: both ends know how the other's block is cut.
void HostCommunicator::swap_blocks(int to, Segments sent, int from, Segments received,
                                   Deadline deadline) {
  if (sent.size() <= 1 && received.size() <= 1) {
    const auto piece = [](Segments block) {
      return block.empty() ? Bytes{} : Bytes(block[0].data, block[0].bytes);
    };
    resources_.transport->exchange(to, piece(sent), from, piece(received), deadline);
    return;
  }
  constexpr std::size_t kPackedBytes = 1016 << 10;  // see tuned_chunk_bytes()
  const std::size_t sent_bytes = total_bytes(sent);
  const std::size_t received_bytes = total_bytes(received);
  Cursor reading(sent, sent);
  Cursor writing(received, received);
  flat_.resize(std::min(kPackedBytes, sent_bytes));
  terms_.resize(std::min(kPackedBytes, received_bytes));
  for (std::size_t at = 0; at < std::max(sent_bytes, received_bytes); at += kPackedBytes) {
    const auto piece = [&](std::size_t total) {
      return at < total ? std::min(kPackedBytes, total - at) : 0;
    };
    const std::size_t going = piece(sent_bytes);
    const std::size_t coming = piece(received_bytes);
    const std::byte* const run = reading.input_run(going);
    std::byte* const target = writing.output_run(coming);
    run == nullptr ? reading.copy_inputs_to(flat_.data(), going) : reading.skip(going);
    resources_.transport->exchange(to, {run == nullptr ? flat_.data() : run, going}, from,
                                   {target == nullptr ? terms_.data() : target, coming}, deadline);
    target == nullptr ? writing.copy_to_outputs(terms_.data(), coming) : writing.skip(coming);
  }
}

void HostCommunicator::broadcast(Segments in, Segments out, int root, Deadline deadline) {
  const std::size_t total = total_bytes(out);
  if (total == 0) return;
  if (root == position_) {
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (in[i].bytes > 0 && in[i].data != out[i].data) {
        copy_bytes(out[i].data, in[i].data, in[i].bytes);
      }
    }
  }
  int root_side = 0;
  int root_local = 0;
  for (int s = 0; s < hosts(); ++s) {
    const auto& side = sides_[static_cast<std::size_t>(s)];
    const auto it = std::ranges::find(side, root);
    if (it == side.end()) continue;
    root_side = s;
    root_local = static_cast<int>(it - side.begin());
  }
  std::vector<std::size_t> bytes(static_cast<std::size_t>(group_.size()), 0);
  std::vector<Cursor> sinks(bytes.size(), Cursor(out, out));
  if (side_ == root_side) {
    bytes[static_cast<std::size_t>(root_local)] = total;
    group_.spread(bytes, Cursor(out, out), sinks, deadline);
    if (hosts() > 1 && leads()) hand_on(out, root_side, deadline);
    return;
  }
  if (leads()) hand_on(out, root_side, deadline);
  bytes[0] = total;
  group_.spread(bytes, Cursor(out, out), sinks, deadline);
}

// Along a binomial tree of the hosts, whose first ranks pass on each piece as it comes: host h,
// counted from the root's, has it from the host whose number lacks h's last bit.
void HostCommunicator::hand_on(Segments out, int root_side, Deadline deadline) {
  constexpr std::size_t kPieceBytes = 1016 << 10;  // see tuned_chunk_bytes()
  constexpr std::size_t kPiecesAhead = 4;
  const auto leader = [&](int h) { return rank_at(sides_[index((root_side + h) % hosts())][0]); };
  const int self = (side_ - root_side + hosts()) % hosts();
  const int below = self == 0 ? hosts() : self & -self;
  std::vector<int> children;
  for (int h = 1; h < below && self + h < hosts(); h *= 2) children.push_back(leader(self + h));
  std::ranges::reverse(children);  // the one with most to pass on is first
  for (const Segment& segment : out) {
    for (std::size_t at = 0; at < segment.bytes; at += kPieceBytes) {
      const Bytes piece(segment.data + at, std::min(kPieceBytes, segment.bytes - at));
      if (self != 0) resources_.transport->recv(leader(self & (self - 1)), piece, deadline);
      resources_.transport->settle(kPiecesAhead, deadline);
      for (const int child : children) resources_.transport->post(child, piece);
    }
  }
  resources_.transport->settle(0, deadline);
}

bool HostBackend::supports(OpKind kind, DType dtype, ReduceOp op, DeviceKind device) const {
  if (device != DeviceKind::kCpu) return false;
  if (!reduces(kind)) return true;
  if (op == ReduceOp::kAdasum) return kind == OpKind::kAllreduce && supports_adasum(dtype);
  return host::supports(dtype, op);
}

std::unique_ptr<Communicator> HostBackend::connect(ProcessSetId, const Place& place,
                                                   std::span<const int> members,
                                                   Communicator* /*on_cpu*/) {
  return std::make_unique<HostCommunicator>(resources_, place, members);
}

}  // namespace polyhvd::host
