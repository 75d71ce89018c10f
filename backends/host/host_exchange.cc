// HostCommunicator, second part: reducescatter, alltoall, and the allreduces that are
// made of them.
#include <algorithm>

#include "host/adasum.h"
#include "host/host_communicator.h"
#include "host/kernels.h"

namespace polyhvd::host {

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
      staged[static_cast<std::size_t>(m)].stage_inputs(group_.writer(), staging.part(self, m, step),
                                                       piece(m));
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
    resources_.overlap();
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
    copy_bytes(out.data() + layout.received_at[self], in.data() + layout.sent_at[self], own);
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
      group_.writer().write(staging.part(self, m, step), in.data() + layout.sent_at[to] + begin,
                            bytes);
      staged += bytes;
    }
    group_.publish_begun(step, staged);
    for (int m = 0; m < group_.size(); ++m) {
      const auto from = static_cast<std::size_t>(here[static_cast<std::size_t>(m)]);
      const std::size_t bytes = m == self ? 0 : piece(from, position);
      if (bytes == 0) continue;
      group_.await_begun_by(m, step, deadline);
      copy_bytes(out.data() + layout.received_at[from] + begin, staging.part(m, self, step), bytes);
    }
    group_.advance();
    resources_.overlap();
  }
}

// In round k every rank sends to the k-th after it and receives from the k-th before
// it. Pairs on one host do not matter here.
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
    resources_.transport->exchange(
        rank_at(static_cast<int>(to)), in.subspan(layout.sent_at[to], sent),
        rank_at(static_cast<int>(from)), out.subspan(layout.received_at[from], received), deadline);
    resources_.overlap();
  }
}

}  // namespace polyhvd::host
