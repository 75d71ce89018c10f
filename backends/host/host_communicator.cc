#include "host/host_communicator.h"

#include <algorithm>
#include <map>

#include "host/adasum.h"
#include "host/kernels.h"

namespace polyhvd::host {
namespace {

// Up to this many bytes staged in all, every rank reduces everything itself: one
// exchange instead of two, at the price of reading all contributions.
constexpr std::size_t kDirectBytesMax = 128 << 10;

std::vector<std::vector<int>> group_by_host(const Fabric& fabric, std::span<const int> members) {
  std::map<int, std::vector<int>> by_domain;
  for (std::size_t i = 0; i < members.size(); ++i) {
    by_domain[fabric.domain_of[static_cast<std::size_t>(members[i])]].push_back(
        static_cast<int>(i));
  }
  std::vector<std::vector<int>> sides;
  for (auto& [domain, positions] : by_domain) sides.push_back(std::move(positions));
  return sides;
}

LocalGroup make_group(Fabric& fabric, ProcessSetId set, std::span<const int> members) {
  const int domain = fabric.domain_of[static_cast<std::size_t>(fabric.rank)];
  const std::vector<int>& ranks_here = fabric.domains[static_cast<std::size_t>(domain)];
  std::vector<int> locals;
  int self = 0;
  for (const int rank : members) {
    const auto it = std::ranges::find(ranks_here, rank);
    if (it == ranks_here.end()) continue;
    if (rank == fabric.rank) self = static_cast<int>(locals.size());
    locals.push_back(static_cast<int>(it - ranks_here.begin()));
  }
  shm::Staging staging;
  if (locals.size() > 1) {
    staging = fabric.segment->staging(static_cast<int>(set), static_cast<int>(locals.size()));
  }
  return LocalGroup(fabric, staging, std::move(locals), self);
}

}  // namespace

// How an operation's bytes are cut: one slice per owner, in chunks. Computed from
// what was agreed alone, hence equal on all ranks.
struct HostCommunicator::Slices {
  std::size_t total;
  std::size_t slice;
  std::size_t chunk;
  std::size_t steps;

  Slices(std::size_t bytes, std::size_t item, int owners, std::size_t chunk_bytes) : total(bytes) {
    const std::size_t unit = shm::kCacheLine * item;  // whole elements, whole cache lines
    const auto n = static_cast<std::size_t>(owners);
    slice = ((bytes + n - 1) / n + unit - 1) / unit * unit;
    chunk = std::max(chunk_bytes / item * item, item);
    steps = (slice + chunk - 1) / chunk;
  }
  std::size_t begin(int owner) const {
    return std::min(total, slice * static_cast<std::size_t>(owner));
  }
  std::size_t size(int owner) const { return begin(owner + 1) - begin(owner); }
  std::size_t bytes_of(int owner, std::size_t step) const {
    const std::size_t at = step * chunk;
    return at >= size(owner) ? 0 : std::min(chunk, size(owner) - at);
  }
};

HostCommunicator::HostCommunicator(Fabric& fabric, ProcessSetId set, std::span<const int> members)
    : fabric_(fabric),
      members_(members.begin(), members.end()),
      sides_(group_by_host(fabric, members)),
      group_(make_group(fabric, set, members)) {
  chunk_bytes_ = shm::kChunkBytesMax;
  rails_ = static_cast<int>(members.size());
  for (std::size_t s = 0; s < sides_.size(); ++s) {
    const auto size = static_cast<int>(sides_[s].size());
    chunk_bytes_ = std::min(chunk_bytes_, shm::chunk_bytes(size));
    rails_ = std::min(rails_, size);
    for (const int position : sides_[s]) {
      if (rank_at(position) != fabric.rank) continue;
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
  const auto ranks_here = static_cast<std::size_t>(group_.size());
  if (members_.size() == 1) {
    reduce_alone(r);
  } else if (op == ReduceOp::kAdasum) {
    reduce_adasum(r);
  } else if (hosts() > 1 && fabric_.reproducible) {
    reduce_in_rank_order(r);
  } else if (hosts() == 1 && r.bytes * ranks_here <= kDirectBytesMax &&
             r.bytes <= group_.staging().region_bytes()) {
    reduce_direct(r);
  } else {
    reduce_sliced(r);
  }
}

void HostCommunicator::reduce_alone(const Reduction& r) {
  const std::size_t item = item_size(r.dtype);
  for (std::size_t i = 0; i < r.in.size(); ++i) {
    const std::byte* source = r.in[i].data;
    const ReduceOp op = r.op == ReduceOp::kAdasum ? ReduceOp::kSum : r.op;
    reduce(r.dtype, op, r.scale, {&source, 1}, r.in[i].bytes / item, r.out[i].data, nullptr);
  }
}

void HostCommunicator::reduce_direct(const Reduction& r) {
  const std::size_t item = item_size(r.dtype);
  const shm::Staging& staging = group_.staging();
  const std::uint64_t step = group_.step();
  group_.await_free(step, r.deadline);
  Cursor(r.in, r.out).copy_inputs_to(staging.region(group_.self(), step), r.bytes);
  group_.publish_begun(step, r.bytes);
  group_.await_begun(step, r.deadline);
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
  const Slices slices(r.bytes, item_size(r.dtype), rails_, chunk_bytes_);
  const int self = group_.self();
  std::vector<Cursor> staged;
  std::vector<Cursor> results;
  for (int owner = 0; owner < rails_; ++owner) {
    staged.emplace_back(r.in, r.out, slices.begin(owner));
    results.push_back(staged.back());
  }
  Cursor mine(r.in, r.out, slices.begin(std::min(self, rails_)));
  for (std::size_t i = 0; i <= slices.steps; ++i) {
    const std::uint64_t step = group_.step();
    if (i < slices.steps) {
      stage(r, slices, i, staged);
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
    fabric_.overlap();
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
    cursors[static_cast<std::size_t>(owner)].copy_inputs_to(
        group_.staging().part(group_.self(), owner, step), bytes);
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
    reduce(r.dtype, r.op, r.scale, sources_, count / item, out,
           staging.part(self, self, step) + offset);
  });
}

void HostCommunicator::reduce_own_chunk_across(const Reduction& r, Cursor& mine,
                                               std::size_t bytes) {
  const std::size_t item = item_size(r.dtype);
  const std::size_t wide = item_size(accumulator_of(r.dtype));
  const shm::Staging& staging = group_.staging();
  const int self = group_.self();
  const std::uint64_t step = group_.step();
  for (auto& partial : partials_) partial.resize(bytes / item * wide);
  std::byte* own = partials_[static_cast<std::size_t>(side_)].data();
  sources_.resize(static_cast<std::size_t>(group_.size()));
  Cursor reading = mine;
  reading.take(bytes, [&](const std::byte* in, std::byte*, std::size_t offset, std::size_t count) {
    for (int m = 0; m < group_.size(); ++m) {
      sources_[static_cast<std::size_t>(m)] = m == self ? in : staging.part(m, self, step) + offset;
    }
    reduce_to_partial(r.dtype, r.op, r.scale.pre, sources_, count / item,
                      own + offset / item * wide);
  });
  exchange_partials(bytes / item * wide, r.deadline);
  sources_.resize(partials_.size());
  mine.take(bytes, [&](const std::byte*, std::byte* out, std::size_t offset, std::size_t count) {
    for (std::size_t h = 0; h < partials_.size(); ++h) {
      sources_[h] = partials_[h].data() + offset / item * wide;
    }
    std::byte* copy = group_.size() > 1 ? staging.part(self, self, step) + offset : nullptr;
    combine_partials(r.dtype, r.op, r.scale.post, sources_, count / item, out, copy);
  });
}

void HostCommunicator::exchange_partials(std::size_t bytes, Deadline deadline) {
  const auto rail = static_cast<std::size_t>(group_.self());
  for (int k = 1; k < hosts(); ++k) {
    const auto to = static_cast<std::size_t>((side_ + k) % hosts());
    const auto from = static_cast<std::size_t>((side_ - k + hosts()) % hosts());
    fabric_.transport->exchange(
        rank_at(sides_[to][rail]), {partials_[static_cast<std::size_t>(side_)].data(), bytes},
        rank_at(sides_[from][rail]), {partials_[from].data(), bytes}, deadline);
  }
}

void HostCommunicator::allgather(ConstBytes in, Bytes out, Counts counts, Deadline deadline) {
  std::vector<std::size_t> offsets(counts.size(), 0);
  for (std::size_t i = 1; i < counts.size(); ++i) offsets[i] = offsets[i - 1] + counts[i - 1];
  const auto block = [&](int position) {
    const auto p = static_cast<std::size_t>(position);
    return Segment{out.data() + offsets[p], counts[p]};
  };
  const Segment own = block(position_);
  if (own.bytes > 0 && own.data != in.data()) std::memcpy(own.data, in.data(), own.bytes);

  const std::vector<int>& here = sides_[static_cast<std::size_t>(side_)];
  std::vector<Segment> blocks;
  std::vector<std::size_t> bytes;
  for (const int position : here) {
    blocks.push_back(block(position));
    bytes.push_back(blocks.back().bytes);
  }
  std::vector<Cursor> sinks;
  for (const Segment& b : blocks) sinks.emplace_back(Segments(&b, 1), Segments(&b, 1));
  const Cursor source(Segments(&own, 1), Segments(&own, 1));
  group_.spread(bytes, source, sinks, deadline);
  if (hosts() > 1) gather_across(out, counts, deadline);
}

// The leaders swap their hosts' blocks, and hand the others' on within the host.
void HostCommunicator::gather_across(Bytes out, Counts counts, Deadline deadline) {
  std::vector<std::size_t> offsets(counts.size(), 0);
  for (std::size_t i = 1; i < counts.size(); ++i) offsets[i] = offsets[i - 1] + counts[i - 1];
  const auto block = [&](const std::vector<int>& side, std::size_t i) {
    if (i >= side.size()) return Bytes{};
    const auto p = static_cast<std::size_t>(side[i]);
    return out.subspan(offsets[p], counts[p]);
  };
  const std::vector<int>& here = sides_[static_cast<std::size_t>(side_)];
  for (int k = 1; leads() && k < hosts(); ++k) {
    const auto& to = sides_[static_cast<std::size_t>((side_ + k) % hosts())];
    const auto& from = sides_[static_cast<std::size_t>((side_ - k + hosts()) % hosts())];
    for (std::size_t i = 0; i < std::max(here.size(), from.size()); ++i) {
      fabric_.transport->exchange(rank_at(to[0]), block(here, i), rank_at(from[0]), block(from, i),
                                  deadline);
    }
  }
  std::vector<std::size_t> bytes(here.size(), 0);
  for (int s = 0; s < hosts(); ++s) {
    if (s == side_) continue;
    for (const int position : sides_[static_cast<std::size_t>(s)]) {
      const auto p = static_cast<std::size_t>(position);
      const Segment b{out.data() + offsets[p], counts[p]};
      bytes[0] = b.bytes;
      std::vector<Cursor> sinks(here.size(), Cursor(Segments(&b, 1), Segments(&b, 1)));
      group_.spread(bytes, sinks[0], sinks, deadline);
    }
  }
}

void HostCommunicator::broadcast(Segments in, Segments out, int root, Deadline deadline) {
  const std::size_t total = total_bytes(out);
  if (total == 0) return;
  if (root == position_) {
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (in[i].bytes > 0 && in[i].data != out[i].data) {
        std::memcpy(out[i].data, in[i].data, in[i].bytes);
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
    for (int s = 0; leads() && s < hosts(); ++s) {
      if (s == side_) continue;
      for (const Segment& segment : out) {
        const int to = rank_at(sides_[static_cast<std::size_t>(s)][0]);
        fabric_.transport->send(to, {segment.data, segment.bytes}, deadline);
      }
    }
    return;
  }
  for (const Segment& segment : out) {
    if (!leads()) break;
    const int from = rank_at(sides_[static_cast<std::size_t>(root_side)][0]);
    fabric_.transport->recv(from, {segment.data, segment.bytes}, deadline);
  }
  bytes[0] = total;
  group_.spread(bytes, Cursor(out, out), sinks, deadline);
}

// ---- reducescatter ----------------------------------------------------------

void HostCommunicator::reducescatter(Segments in, Segments out, Counts counts, DType dtype,
                                     ReduceOp op, Scale scale, Deadline deadline) {
  const Segments own = in.subspan(static_cast<std::size_t>(position_) * out.size(), out.size());
  const Reduction r{in, out, dtype, op, scale, deadline, total_bytes(in)};
  if (r.bytes == 0) return;
  if (members_.size() == 1) {
    reduce_alone(r);
  } else if (hosts() == 1) {
    scatter_here(r, own, counts);
  } else {
    flat_.resize(r.bytes);
    Cursor(in, in).copy_inputs_to(flat_.data(), r.bytes);
    reduce_terms(r, collect_terms(flat_, counts, deadline), Cursor(own, out), total_bytes(own));
  }
}

// As the first half of reduce_sliced, with a slice for every member.
void HostCommunicator::scatter_here(const Reduction& r, Segments own, Counts counts) {
  const std::size_t item = item_size(r.dtype);
  const shm::Staging& staging = group_.staging();
  const std::size_t chunk = staging.chunk_bytes / item * item;
  const int self = group_.self();
  std::vector<Cursor> staged;
  std::size_t at = 0;
  for (const std::size_t bytes : counts) {
    staged.emplace_back(r.in, r.in, at);
    at += bytes;
  }
  Cursor mine(own, r.out);
  sources_.resize(counts.size());
  const std::size_t most = *std::ranges::max_element(counts);
  for (std::size_t begin = 0; begin < most; begin += chunk) {
    const auto piece = [&](int m) {
      const std::size_t bytes = counts[static_cast<std::size_t>(m)];
      return begin < bytes ? std::min(chunk, bytes - begin) : 0;
    };
    const std::uint64_t step = group_.step();
    std::size_t written = 0;
    group_.await_free(step, r.deadline);
    for (int m = 0; m < group_.size(); ++m) {
      if (m == self) continue;
      staged[static_cast<std::size_t>(m)].copy_inputs_to(staging.part(self, m, step), piece(m));
      written += piece(m);
    }
    group_.publish_begun(step, written);
    if (piece(self) > 0) group_.await_begun(step, r.deadline);
    mine.take(piece(self),
              [&](const std::byte* in, std::byte* out, std::size_t offset, std::size_t count) {
                for (int m = 0; m < group_.size(); ++m) {
                  sources_[static_cast<std::size_t>(m)] =
                      m == self ? in : staging.part(m, self, step) + offset;
                }
                reduce(r.dtype, r.op, r.scale, sources_, count / item, out, nullptr);
              });
    group_.advance();
    fabric_.overlap();
  }
}

// Every member's share of this rank's part of `in`, in order of rank; counts[m] bytes of
// it are member m's part.
ConstBytes HostCommunicator::collect_terms(ConstBytes in, Counts counts, Deadline deadline) {
  const std::size_t n = members_.size();
  std::vector<std::size_t> table(n * n);
  for (std::size_t i = 0; i < table.size(); ++i) table[i] = counts[i % n];
  terms_.resize(n * counts[static_cast<std::size_t>(position_)]);
  alltoall(in, terms_, table, deadline);
  return terms_;
}

void HostCommunicator::reduce_terms(const Reduction& r, ConstBytes terms, Cursor own,
                                    std::size_t bytes) {
  const std::size_t item = item_size(r.dtype);
  sources_.resize(members_.size());
  own.take(bytes, [&](const std::byte*, std::byte* out, std::size_t offset, std::size_t count) {
    for (std::size_t m = 0; m < sources_.size(); ++m) {
      sources_[m] = terms.data() + m * bytes + offset;
    }
    reduce(r.dtype, r.op, r.scale, sources_, count / item, out, nullptr);
  });
}

// ---- allreduce as a reducescatter and an allgather ----------------------------

namespace {

// Bounds the scratch memory of reduce_in_rank_order.
constexpr std::size_t kBlockBytes = 4 << 20;

// Bytes of the part of each of `members` in `bytes` bytes, whole elements.
std::vector<std::size_t> even_parts(std::size_t bytes, std::size_t item, std::size_t members) {
  std::vector<std::size_t> parts(members);
  for (std::size_t m = 0; m < members; ++m) {
    const auto elements = static_cast<std::int64_t>(bytes / item);
    parts[m] = static_cast<std::size_t>(
                   rows_kept(elements, static_cast<int>(m), static_cast<int>(members))) *
               item;
  }
  return parts;
}

}  // namespace

// Every term of an element goes to the rank that adds them, so that the hosts do not
// enter: as many times the traffic between hosts as a host has ranks.
void HostCommunicator::reduce_in_rank_order(const Reduction& r) {
  Cursor reading(r.in, r.out);
  Cursor writing = reading;
  for (std::size_t at = 0; at < r.bytes; at += kBlockBytes) {
    const std::size_t bytes = std::min(kBlockBytes, r.bytes - at);
    const std::vector<std::size_t> parts = even_parts(bytes, item_size(r.dtype), members_.size());
    flat_.resize(bytes);
    reading.copy_inputs_to(flat_.data(), bytes);
    const ConstBytes terms = collect_terms(flat_, parts, r.deadline);
    Segment own{flat_.data(), parts[static_cast<std::size_t>(position_)]};
    for (int m = 0; m < position_; ++m) own.data += parts[static_cast<std::size_t>(m)];
    reduce_terms(r, terms, Cursor({&own, 1}, {&own, 1}), own.bytes);
    allgather({own.data, own.bytes}, flat_, parts, r.deadline);
    writing.copy_to_outputs(flat_.data(), bytes);
  }
}

// Each rank holds its part of all members' vectors; what they need of each other are
// the dot products of every tensor, which are small.
void HostCommunicator::reduce_adasum(const Reduction& r) {
  const std::size_t item = item_size(r.dtype);
  const std::size_t wide = item_size(accumulator_of(r.dtype));
  const std::vector<std::size_t> parts = even_parts(r.bytes, item, members_.size());
  std::vector<std::byte> all(r.bytes);
  Cursor(r.in, r.out).copy_inputs_to(all.data(), r.bytes);
  const ConstBytes terms = collect_terms(all, parts, r.deadline);
  std::size_t first = 0;
  for (int m = 0; m < position_; ++m) first += parts[static_cast<std::size_t>(m)];
  const std::size_t own = parts[static_cast<std::size_t>(position_)];
  vectors_.resize(members_.size() * own / item * wide);
  for (std::size_t m = 0; m < members_.size(); ++m) {
    const std::byte* term = terms.data() + m * own;
    reduce_to_partial(r.dtype, ReduceOp::kSum, r.scale.pre, {&term, 1}, own / item,
                      vectors_.data() + m * own / item * wide);
  }
  add_adaptively_in_tree(r, first / item, own / item);
  const std::byte* result = vectors_.data();
  combine_partials(r.dtype, ReduceOp::kSum, r.scale.post, {&result, 1}, own / item,
                   all.data() + first, nullptr);
  allgather({all.data() + first, own}, all, parts, r.deadline);
  Cursor(r.in, r.out).copy_to_outputs(all.data(), r.bytes);
}

// Pairs of neighbours, then pairs of pairs: the same tree whatever the hosts are. This
// rank holds `count` elements of every vector, from element `first` on.
void HostCommunicator::add_adaptively_in_tree(const Reduction& r, std::size_t first,
                                              std::size_t count) {
  const DType dtype = accumulator_of(r.dtype);
  const std::size_t item = item_size(dtype);
  const std::size_t n = members_.size();
  struct Piece {  // of a tensor, within this rank's part
    std::size_t begin;
    std::size_t count;
  };
  std::vector<Piece> pieces;
  std::size_t at = 0;
  for (const Segment& tensor : r.in) {
    const std::size_t end = at + tensor.bytes / item_size(r.dtype);
    const std::size_t from = std::clamp(at, first, first + count);
    const std::size_t to = std::clamp(end, first, first + count);
    pieces.push_back({from - first, to - from});
    at = end;
  }
  const auto piece_of = [&](std::size_t vector, const Piece& piece) {
    return vectors_.data() + (vector * count + piece.begin) * item;
  };
  std::vector<InnerProducts> products;
  for (std::size_t width = 1; width < n; width *= 2) {
    products.clear();
    for (std::size_t a = 0; a + width < n; a += 2 * width) {
      for (const Piece& piece : pieces) {
        products.push_back(
            inner_products(dtype, piece_of(a, piece), piece_of(a + width, piece), piece.count));
      }
    }
    const Segment sums{reinterpret_cast<std::byte*>(products.data()),
                       products.size() * sizeof(InnerProducts)};
    allreduce({&sums, 1}, {&sums, 1}, DType::kFloat64, ReduceOp::kSum, {}, r.deadline);
    auto product = products.begin();
    for (std::size_t a = 0; a + width < n; a += 2 * width) {
      for (const Piece& piece : pieces) {
        add_adaptively(dtype, piece_of(a, piece), piece_of(a + width, piece), piece.count,
                       *product++);
      }
    }
  }
}

// ---- alltoall -----------------------------------------------------------------

namespace {

// Where each member's part begins, when the parts follow each other.
struct Layout {
  std::vector<std::size_t> sent_at;
  std::vector<std::size_t> received_at;

  Layout(Counts counts, std::size_t n, std::size_t self) : sent_at(n), received_at(n) {
    for (std::size_t m = 1; m < n; ++m) {
      sent_at[m] = sent_at[m - 1] + counts[self * n + m - 1];
      received_at[m] = received_at[m - 1] + counts[(m - 1) * n + self];
    }
  }
};

}  // namespace

void HostCommunicator::alltoall(ConstBytes in, Bytes out, Counts counts, Deadline deadline) {
  const std::size_t n = members_.size();
  const auto self = static_cast<std::size_t>(position_);
  const Layout layout(counts, n, self);
  if (const std::size_t own = counts[self * n + self]; own > 0) {
    std::memcpy(out.data() + layout.received_at[self], in.data() + layout.sent_at[self], own);
  }
  if (group_.size() > 1) alltoall_here(in, out, counts, deadline);
  if (hosts() > 1) alltoall_across(in, out, counts, deadline);
}

void HostCommunicator::alltoall_here(ConstBytes in, Bytes out, Counts counts, Deadline deadline) {
  const std::size_t n = members_.size();
  const auto position = static_cast<std::size_t>(position_);
  const Layout layout(counts, n, position);
  const std::vector<int>& here = sides_[static_cast<std::size_t>(side_)];
  const shm::Staging& staging = group_.staging();
  const std::size_t chunk = staging.chunk_bytes;
  const int self = group_.self();
  std::size_t most = 0;
  for (const int from : here) {
    for (const int to : here) {
      if (from == to) continue;
      most =
          std::max(most, counts[static_cast<std::size_t>(from) * n + static_cast<std::size_t>(to)]);
    }
  }
  for (std::size_t begin = 0; begin < most; begin += chunk) {
    const auto piece = [&](std::size_t from, std::size_t to) {
      const std::size_t bytes = counts[from * n + to];
      return begin < bytes ? std::min(chunk, bytes - begin) : 0;
    };
    const std::uint64_t step = group_.step();
    std::size_t staged = 0;
    group_.await_free(step, deadline);
    for (int m = 0; m < group_.size(); ++m) {
      const auto to = static_cast<std::size_t>(here[static_cast<std::size_t>(m)]);
      const std::size_t bytes = m == self ? 0 : piece(position, to);
      if (bytes == 0) continue;
      std::memcpy(staging.part(self, m, step), in.data() + layout.sent_at[to] + begin, bytes);
      staged += bytes;
    }
    group_.publish_begun(step, staged);
    for (int m = 0; m < group_.size(); ++m) {
      const auto from = static_cast<std::size_t>(here[static_cast<std::size_t>(m)]);
      const std::size_t bytes = m == self ? 0 : piece(from, position);
      if (bytes == 0) continue;
      group_.await_begun_by(m, step, deadline);
      std::memcpy(out.data() + layout.received_at[from] + begin, staging.part(m, self, step),
                  bytes);
    }
    group_.advance();
    fabric_.overlap();
  }
}

// In round k every rank sends to the k-th after it and receives from the k-th before
// it. Pairs on one host have nothing to say here.
void HostCommunicator::alltoall_across(ConstBytes in, Bytes out, Counts counts, Deadline deadline) {
  const std::size_t n = members_.size();
  const auto self = static_cast<std::size_t>(position_);
  const Layout layout(counts, n, self);
  const auto is_here = [&](std::size_t position) {
    return std::ranges::count(sides_[static_cast<std::size_t>(side_)], static_cast<int>(position)) >
           0;
  };
  for (std::size_t k = 1; k < n; ++k) {
    const std::size_t to = (self + k) % n;
    const std::size_t from = (self + n - k) % n;
    const std::size_t sent = is_here(to) ? 0 : counts[self * n + to];
    const std::size_t received = is_here(from) ? 0 : counts[from * n + self];
    if (sent + received == 0) continue;
    fabric_.transport->exchange(rank_at(static_cast<int>(to)), in.subspan(layout.sent_at[to], sent),
                                rank_at(static_cast<int>(from)),
                                out.subspan(layout.received_at[from], received), deadline);
    fabric_.overlap();
  }
}

// ---- the backend ----------------------------------------------------------------

bool HostBackend::supports(OpKind kind, DType dtype, ReduceOp op, DeviceKind device) const {
  if (device != DeviceKind::kCpu) return false;
  if (!reduces(kind)) return true;
  if (op == ReduceOp::kAdasum) return kind == OpKind::kAllreduce && supports_adasum(dtype);
  return host::supports(dtype, op);
}

std::unique_ptr<Communicator> HostBackend::connect(ProcessSetId set, std::span<const int> members) {
  return std::make_unique<HostCommunicator>(fabric_, set, members);
}

}  // namespace polyhvd::host
