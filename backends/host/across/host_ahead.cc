// HostCommunicator, fourth part: an allreduce between hosts that have one rank each. Nothing is to
// be added within a host, and no other rank there waits: terms cross as they lie in the tensors, in
// their own type, and several chunks are on their way while this rank adds.
#include <algorithm>

#include "host/host_communicator.h"
#include "host/kernels.h"

namespace polyhvd::host {
namespace {

// Of all hosts' pieces of a chunk, which are also what of the tensors that are not in one piece
// lies in memory of ours.
constexpr std::size_t kChunkBytesMax = 4 << 20;

}  // namespace

// Everybody sends everything: one message instead of two, at the price of more bytes.
void HostCommunicator::swap_terms(const Reduction& r) {
  const std::size_t item = item_size(r.dtype);
  Cursor mine(r.in, r.out);
  const std::byte* own = mine.input_run(r.bytes);
  if (own == nullptr) {
    flat_.resize(r.bytes);
    Cursor(mine).copy_inputs_to(flat_.data(), r.bytes);
    own = flat_.data();
  }
  for (int k = 1; k < hosts(); ++k) {
    resources_.transport->post(owner_on(next_side(k)), {own, r.bytes});
  }
  sources_.resize(partials_.size());
  sources_[index(side_)] = own;
  for (int k = 1; k < hosts(); ++k) {
    auto& terms = partials_[index(next_side(-k))];
    terms.resize(r.bytes);
    resources_.transport->recv(owner_on(next_side(-k)), terms, r.deadline);
    sources_[index(next_side(-k))] = terms.data();
  }
  resources_.transport->settle(0, r.deadline);  // the result may take the place of what was sent
  std::vector<const std::byte*> from(sources_);
  mine.take(r.bytes, [&](const std::byte*, std::byte* out, std::size_t at, std::size_t count) {
    for (std::size_t h = 0; h < from.size(); ++h) sources_[h] = from[h] + at;
    reduce(r.dtype, r.op, r.scale, sources_, count / item, out, nullptr);
  });
}

// Each host adds its piece of every chunk. A chunk's terms are sent, kChunksAhead chunks later its
// terms are received, added and the sum is sent, and as many chunks later the others' sums are
// received. Both ends of a connection thus know the order of its messages.
void HostCommunicator::reduce_ahead(const Reduction& r) {
  const std::size_t item = item_size(r.dtype);
  const std::size_t unit = shm::kCacheLine * item;
  const auto sides = static_cast<std::size_t>(hosts());
  const std::size_t piece =
      std::max(std::min(tuned_chunk_bytes(), kChunkBytesMax / sides) / unit, std::size_t{1}) * unit;
  const std::size_t chunk = piece * sides;
  const std::size_t chunks = (r.bytes + chunk - 1) / chunk;
  Cursor reading(r.in, r.out);
  const auto slot = [this](std::size_t i) -> Chunk& { return ahead_[i % ahead_.size()]; };
  for (std::size_t i = 0; i < chunks + 2 * kChunksAhead; ++i) {
    if (i < chunks) {
      // The sum of the chunk that was in this slot must be gone.
      resources_.transport->settle(2 * kChunksAhead, r.deadline);
      Chunk& next = slot(i);
      next.pieces = Pieces(std::min(chunk, r.bytes - i * chunk), item, hosts());
      send_terms(next, reading);
    }
    if (i >= kChunksAhead && i - kChunksAhead < chunks) add_terms(r, slot(i - kChunksAhead));
    if (i >= 2 * kChunksAhead) take_sums(r, slot(i - 2 * kChunksAhead));
    resources_.overlap();
  }
  resources_.transport->settle(0, r.deadline);
}

// Where a host's piece is not in one, it goes by the chunk's own memory, back and forth.
void HostCommunicator::send_terms(Chunk& chunk, Cursor& reading) {
  chunk.at.clear();
  for (std::size_t h = 0; h < partials_.size(); ++h) {
    chunk.at.push_back(reading);
    reading.skip(chunk.pieces.size(h));
  }
  for (int k = 1; k < hosts(); ++k) {
    const std::size_t to = index(next_side(k));
    const std::size_t bytes = chunk.pieces.size(to);
    if (bytes == 0) continue;
    const std::byte* terms = chunk.at[to].input_run(bytes);
    if (terms == nullptr) {
      terms = chunk.place(to);
      Cursor(chunk.at[to]).copy_inputs_to(chunk.place(to), bytes);
    }
    resources_.transport->post(owner_on(next_side(k)), {terms, bytes});
  }
}

void HostCommunicator::add_terms(const Reduction& r, Chunk& chunk) {
  const std::size_t item = item_size(r.dtype);
  const std::size_t self = index(side_);
  const std::size_t bytes = chunk.pieces.size(self);
  if (bytes == 0) return;
  for (int k = 1; k < hosts(); ++k) {
    auto& terms = partials_[index(next_side(-k))];
    terms.resize(bytes);
    resources_.transport->recv(owner_on(next_side(-k)), terms, r.deadline);
  }
  std::byte* const run = chunk.at[self].output_run(bytes);
  std::byte* const place = run == nullptr ? chunk.place(self) : nullptr;
  sources_.resize(partials_.size());
  Cursor(chunk.at[self])
      .take(bytes, [&](const std::byte* in, std::byte* out, std::size_t at, std::size_t count) {
        for (std::size_t h = 0; h < sources_.size(); ++h) {
          sources_[h] = h == self ? in : partials_[h].data() + at;
        }
        std::byte* const copy = place == nullptr ? nullptr : place + at;
        reduce(r.dtype, r.op, r.scale, sources_, count / item, out, copy);
      });
  for (int k = 1; k < hosts(); ++k) {
    resources_.transport->post(owner_on(next_side(k)), {run == nullptr ? place : run, bytes});
  }
}

void HostCommunicator::take_sums(const Reduction& r, Chunk& chunk) {
  for (int k = 1; k < hosts(); ++k) {
    const std::size_t from = index(next_side(-k));
    const std::size_t bytes = chunk.pieces.size(from);
    if (bytes == 0) continue;
    std::byte* const run = chunk.at[from].output_run(bytes);
    std::byte* const sums = run == nullptr ? chunk.place(from) : run;
    resources_.transport->recv(owner_on(next_side(-k)), {sums, bytes}, r.deadline);
    if (run == nullptr) Cursor(chunk.at[from]).copy_to_outputs(sums, bytes);
  }
}

}  // namespace polyhvd::host
