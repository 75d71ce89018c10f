// HostCommunicator, third part: what an allreduce does between hosts. Each sends the sum
// of its ranks to the others, and adds what it gets in order of hosts.
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

// A host with one rank shares nothing with others that would have to wait: several chunks
// are on their way at a time, so that the network has something to carry while this rank adds.
void HostCommunicator::reduce_ahead(const Reduction& r) {
  const std::size_t item = item_size(r.dtype);
  const std::size_t wide = item_size(accumulator_of(r.dtype));
  const Slices slices(r.bytes, item, rails_, tuned_chunk_bytes());
  Cursor reading(r.in, r.out);
  Cursor writing = reading;
  for (std::size_t i = 0; i + 1 < slices.steps + kChunksAhead; ++i) {
    if (i < slices.steps) {
      fabric_.transport->settle(kChunksAhead - 1, r.deadline);
      send_ahead(r, reading, slices.bytes_of(0, i), ahead_[i % kChunksAhead]);
    }
    if (i + 1 < kChunksAhead) continue;
    const std::size_t j = i + 1 - kChunksAhead;
    const std::size_t bytes = slices.bytes_of(0, j);
    sources_.resize(partials_.size());
    for (int s = 0; s < hosts(); ++s) {
      auto& partial = partials_[static_cast<std::size_t>(s)];
      if (s != side_) {
        partial.resize(bytes / item * wide);
        fabric_.transport->recv(rank_at(sides_[static_cast<std::size_t>(s)][0]), partial,
                                r.deadline);
      }
    }
    writing.take(
        bytes, [&](const std::byte*, std::byte* out, std::size_t offset, std::size_t count) {
          for (std::size_t s = 0; s < partials_.size(); ++s) {
            const auto& partial =
                static_cast<int>(s) == side_ ? ahead_[j % kChunksAhead] : partials_[s];
            sources_[s] = partial.data() + offset / item * wide;
          }
          combine_partials(r.dtype, r.op, r.scale.post, sources_, count / item, out, nullptr);
        });
    fabric_.overlap();
  }
  fabric_.transport->settle(0, r.deadline);
}

void HostCommunicator::send_ahead(const Reduction& r, Cursor& reading, std::size_t bytes,
                                  std::vector<std::byte>& partial) {
  const std::size_t item = item_size(r.dtype);
  const std::size_t wide = item_size(accumulator_of(r.dtype));
  partial.resize(bytes / item * wide);
  reading.take(bytes, [&](const std::byte* in, std::byte*, std::size_t offset, std::size_t count) {
    reduce_to_partial(r.dtype, r.op, r.scale.pre, {&in, 1}, count / item,
                      partial.data() + offset / item * wide);
  });
  for (int k = 1; k < hosts(); ++k) {
    const auto to = static_cast<std::size_t>((side_ + k) % hosts());
    fabric_.transport->post(rank_at(sides_[to][0]), partial);
  }
}

}  // namespace polyhvd::host
