// HostCommunicator, third part: what an allreduce does between hosts that have several ranks. The
// owners of a slice on all hosts add each other's sums, in order of hosts.
#include <algorithm>

#include "host/host_communicator.h"
#include "host/kernels.h"
#include "host/slices.h"

namespace polyhvd::host {

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
  if (hosts() > 2 && !is_little(bytes / item * wide)) return spread_sums(r, mine, bytes);
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
  for (int k = 1; k < hosts(); ++k) {
    const std::size_t from = index(next_side(-k));
    resources_.transport->exchange(
        owner_on(next_side(k)), {partials_[static_cast<std::size_t>(side_)].data(), bytes},
        owner_on(next_side(-k)), {partials_[from].data(), bytes}, deadline);
  }
}

// Every host adds a piece of the chunk and sends the sum to the others. Two hosts would send no
// less that way.
void HostCommunicator::spread_sums(const Reduction& r, Cursor& mine, std::size_t bytes) {
  const std::size_t item = item_size(r.dtype);
  const std::size_t wide = item_size(accumulator_of(r.dtype));
  const std::size_t self = index(side_);
  const Pieces pieces(bytes, item, hosts());
  const auto in_partials = [&](std::size_t h, std::size_t to) {
    return Bytes(partials_[h]).subspan(to / item * wide);
  };
  for (int k = 1; k < hosts(); ++k) {
    const std::size_t to = index(next_side(k));
    const std::size_t from = index(next_side(-k));
    resources_.transport->exchange(
        owner_on(next_side(k)),
        in_partials(self, pieces.begin(to)).first(pieces.size(to) / item * wide),
        owner_on(next_side(-k)), Bytes(partials_[from]).first(pieces.size(self) / item * wide),
        r.deadline);
  }
  sums_.resize(bytes);
  sources_.resize(partials_.size());
  for (std::size_t h = 0; h < partials_.size(); ++h) {
    sources_[h] = h == self ? in_partials(self, pieces.begin(self)).data() : partials_[h].data();
  }
  combine_partials(r.dtype, r.op, r.scale.post, sources_, pieces.size(self) / item,
                   sums_.data() + pieces.begin(self), nullptr);
  const auto sum_of = [&](std::size_t h) {
    return Bytes(sums_).subspan(pieces.begin(h), pieces.size(h));
  };
  for (int k = 1; k < hosts(); ++k) {
    const std::size_t from = index(next_side(-k));
    resources_.transport->exchange(owner_on(next_side(k)), sum_of(self), owner_on(next_side(-k)),
                                   sum_of(from), r.deadline);
  }
  if (group_.size() > 1) {
    copy_bytes(group_.staging().part(group_.self(), group_.self(), group_.step()), sums_.data(),
               bytes);
  }
  mine.copy_to_outputs(sums_.data(), bytes);
}

}  // namespace polyhvd::host
