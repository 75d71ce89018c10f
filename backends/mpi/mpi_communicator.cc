#include "mpi/mpi_communicator.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "host/kernels.h"

namespace polyhvd::mpi {
namespace {

constexpr std::size_t kRoundBytes = 8 << 20;
// Of an allreduce within a host, for each pair of ranks: on two ranks it then stays in a core's
// cache from its packing until its result is unpacked. More ranks wait for each other more often.
constexpr std::size_t kLocalRoundBytes = 256 << 10;
// Tags of MPI reach to 32767 at least; process sets have small numbers.
constexpr int kTagModulus = 1 << 14;

std::size_t rounds_of(std::size_t bytes, std::size_t per_round) {
  return (bytes + per_round - 1) / per_round;
}

// The bytes of a run of `bytes` that round `round` moves.
std::size_t piece_of(std::size_t bytes, std::size_t round, std::size_t per_round) {
  const std::size_t begin = round * per_round;
  return begin < bytes ? std::min(per_round, bytes - begin) : 0;
}

// Grows only: a vector would clear what it gains each time.
void make_room(std::vector<std::byte>& memory, std::size_t bytes) {
  if (memory.size() < bytes) memory.resize(bytes);
}

// Where each part begins when they follow each other; returns the bytes of all.
std::size_t set_offsets(const std::vector<int>& counts, std::vector<int>& offsets) {
  offsets.resize(counts.size());
  std::exclusive_scan(counts.begin(), counts.end(), offsets.begin(), 0);
  return static_cast<std::size_t>(offsets.back()) + static_cast<std::size_t>(counts.back());
}

// Copies tensors to and from what travels, in the element type that travels, and scales.
class Packing {
 public:
  Packing(DType dtype, ReduceOp op, Scale scale, DType carried)
      : dtype_(dtype), op_(op), scale_(scale), carried_(carried) {}

  // Bytes that travel for `bytes` of the tensors.
  std::size_t carried_bytes(std::size_t bytes) const {
    return bytes / item_size(dtype_) * item_size(carried_);
  }

  void pack(host::Cursor& cursor, std::size_t bytes, std::byte* to) const {
    cursor.take(bytes, [&](const std::byte* in, std::byte*, std::size_t at, std::size_t count) {
      std::byte* target = to + carried_bytes(at);
      const std::size_t elements = count / item_size(dtype_);
      if (carried_ != dtype_) {
        host::reduce_to_partial(dtype_, op_, scale_.pre, {&in, 1}, elements, target);
      } else if (scale_.pre != 1.0) {
        host::reduce(dtype_, op_, {scale_.pre, 1.0}, {&in, 1}, elements, target, nullptr);
      } else {
        std::memcpy(target, in, count);
      }
    });
  }

  // Always by a kernel: that is where every NaN becomes the same one.
  void unpack(const std::byte* from, std::size_t bytes, host::Cursor& cursor) const {
    cursor.take(bytes, [&](const std::byte*, std::byte* out, std::size_t at, std::size_t count) {
      const std::byte* source = from + carried_bytes(at);
      const std::size_t elements = count / item_size(dtype_);
      if (carried_ != dtype_) {
        host::combine_partials(dtype_, op_, scale_.post, {&source, 1}, elements, out, nullptr);
      } else {
        host::reduce(dtype_, op_, {1.0, scale_.post}, {&source, 1}, elements, out, nullptr);
      }
    });
  }

 private:
  DType dtype_;
  ReduceOp op_;
  Scale scale_;
  DType carried_;
};

}  // namespace

MpiCommunicator::MpiCommunicator(Resources& resources, ProcessSetId set,
                                 std::span<const int> members)
    : resources_(resources),
      library_(resources.library()),
      allreduce_round_bytes_(kRoundBytes),
      set_(set),
      members_(members.begin(), members.end()),
      size_(members.size()),
      self_(static_cast<std::size_t>(std::ranges::find(members, resources.job().rank()) -
                                     members.begin())) {
  for (auto& flight : flights_) flight = std::make_unique<Flight>();
  if (resources.are_on_one_host(members)) {
    allreduce_round_bytes_ = std::min(kRoundBytes, kLocalRoundBytes * size_ * size_);
  }
}

MpiCommunicator::~MpiCommunicator() {
  for (auto& flight : flights_) {
    // What still flies belongs to MPI, for as long as the process lives.
    if (flight->flying) (void)flight.release();
  }
  if (communicator_ && resources_.usable()) library_.free_communicator(*communicator_);
}

Handle MpiCommunicator::connected(Deadline deadline) {
  if (!communicator_) {
    const auto making = resources_.job().runtime().make_group(
        resources_.job().communicator(), members_, static_cast<int>(set_) % kTagModulus);
    resources_.await(*making.call, deadline);
    communicator_ = *making.made;
  }
  return *communicator_;
}

// Begins one round after the other, and ends each while the next one flies.
template <class Begin, class End>
void MpiCommunicator::run(std::size_t rounds, Deadline deadline, Begin&& begin, End&& end) {
  for (std::size_t round = 0; round <= rounds; ++round) {
    if (round < rounds) {
      Flight& flight = *flights_[round % 2];
      flight.flying = true;
      begin(round, flight);
      resources_.overlap();
    }
    if (round > 0) {
      Flight& flight = *flights_[(round - 1) % 2];
      resources_.await(flight, deadline);
      end(round - 1, flight);
    }
  }
}

void MpiCommunicator::allreduce(Segments in, Segments out, DType dtype, ReduceOp op, Scale scale,
                                Deadline deadline) {
  const Handle communicator = connected(deadline);
  const LibraryReduction reduction = resources_.reductions().of(dtype, op, scale);
  const Packing packing(dtype, op, scale, reduction.carried);
  const std::size_t total = total_bytes(in);
  const std::size_t per_round =
      allreduce_round_bytes_ / item_size(reduction.carried) * item_size(dtype);
  host::Cursor reading(in, out);
  host::Cursor writing(in, out);
  run(
      rounds_of(total, per_round), deadline,
      [&](std::size_t round, Flight& flight) {
        const std::size_t bytes = piece_of(total, round, per_round);
        const std::size_t travelling = packing.carried_bytes(bytes);
        make_room(flight.sent, travelling);
        packing.pack(reading, bytes, flight.sent.data());
        resources_.count(travelling);
        library_.start_allreduce(flight.sent.data(), static_cast<int>(bytes / item_size(dtype)),
                                 reduction.datatype, reduction.operation, communicator,
                                 flight.request);
      },
      [&](std::size_t round, Flight& flight) {
        packing.unpack(flight.sent.data(), piece_of(total, round, per_round), writing);
      });
}

void MpiCommunicator::allgather(Segments in, Segments out, Counts counts, Deadline deadline) {
  const Handle communicator = connected(deadline);
  const std::size_t per_round = std::max<std::size_t>(1, kRoundBytes / size_);
  host::Cursor reading(in, in);
  std::vector<host::Cursor> parts;  // of each member, in the output
  for (std::size_t m = 0; m < size_; ++m) {
    const Segments part = out.subspan(m * in.size(), in.size());
    parts.emplace_back(part, part);
  }
  run(
      rounds_of(std::ranges::max(counts), per_round), deadline,
      [&](std::size_t round, Flight& flight) {
        flight.received_counts.resize(size_);
        for (std::size_t m = 0; m < size_; ++m) {
          flight.received_counts[m] = static_cast<int>(piece_of(counts[m], round, per_round));
        }
        make_room(flight.received, set_offsets(flight.received_counts, flight.received_offsets));
        const std::size_t own = piece_of(counts[self_], round, per_round);
        make_room(flight.sent, own);
        reading.copy_inputs_to(flight.sent.data(), own);
        resources_.count(own);
        library_.start_allgather(flight.sent.data(), static_cast<int>(own), flight.received.data(),
                                 flight.received_counts.data(), flight.received_offsets.data(),
                                 communicator, flight.request);
      },
      [&](std::size_t, Flight& flight) {
        for (std::size_t m = 0; m < size_; ++m) {
          parts[m].copy_to_outputs(flight.received.data() + flight.received_offsets[m],
                                   static_cast<std::size_t>(flight.received_counts[m]));
        }
      });
}

void MpiCommunicator::broadcast(Segments in, Segments out, int root, Deadline deadline) {
  const Handle communicator = connected(deadline);
  const std::size_t total = total_bytes(out);
  const bool roots = root == static_cast<int>(self_);
  host::Cursor reading(in, out);
  host::Cursor writing(in, out);
  run(
      rounds_of(total, kRoundBytes), deadline,
      [&](std::size_t round, Flight& flight) {
        const std::size_t bytes = piece_of(total, round, kRoundBytes);
        make_room(flight.sent, bytes);
        if (roots) {
          reading.copy_inputs_to(flight.sent.data(), bytes);
          resources_.count(bytes);
        }
        library_.start_broadcast(flight.sent.data(), static_cast<int>(bytes), root, communicator,
                                 flight.request);
      },
      [&](std::size_t round, Flight& flight) {
        writing.copy_to_outputs(flight.sent.data(), piece_of(total, round, kRoundBytes));
      });
}

void MpiCommunicator::reducescatter(Segments in, Segments out, Counts counts, DType dtype,
                                    ReduceOp op, Scale scale, Deadline deadline) {
  const Handle communicator = connected(deadline);
  const LibraryReduction reduction = resources_.reductions().of(dtype, op, scale);
  const Packing packing(dtype, op, scale, reduction.carried);
  const std::size_t item = item_size(dtype);
  const std::size_t per_round =
      std::max<std::size_t>(1, kRoundBytes / size_ / item_size(reduction.carried)) * item;
  std::vector<host::Cursor> parts;  // of each member, in the input
  for (std::size_t m = 0, at = 0; m < size_; at += counts[m++]) parts.emplace_back(in, in, at);
  host::Cursor writing(out, out);
  run(
      rounds_of(std::ranges::max(counts), per_round), deadline,
      [&](std::size_t round, Flight& flight) {
        std::size_t all = 0;
        for (const std::size_t bytes : counts) all += piece_of(bytes, round, per_round);
        make_room(flight.sent, packing.carried_bytes(all));
        make_room(flight.received,
                  packing.carried_bytes(piece_of(counts[self_], round, per_round)));
        flight.sent_counts.resize(size_);
        std::size_t filled = 0;
        for (std::size_t m = 0; m < size_; ++m) {
          const std::size_t bytes = piece_of(counts[m], round, per_round);
          packing.pack(parts[m], bytes, flight.sent.data() + filled);
          filled += packing.carried_bytes(bytes);
          flight.sent_counts[m] = static_cast<int>(bytes / item);
        }
        resources_.count(filled);
        library_.start_reduce_scatter(flight.sent.data(), flight.received.data(),
                                      flight.sent_counts.data(), reduction.datatype,
                                      reduction.operation, communicator, flight.request);
      },
      [&](std::size_t round, Flight& flight) {
        packing.unpack(flight.received.data(), piece_of(counts[self_], round, per_round), writing);
      });
}

void MpiCommunicator::alltoall(ConstBytes in, Bytes out, Counts counts, Deadline deadline) {
  const Handle communicator = connected(deadline);
  const std::size_t per_round = std::max<std::size_t>(1, kRoundBytes / size_);
  const auto sent_to = [&](std::size_t m) { return counts[self_ * size_ + m]; };
  const auto received_from = [&](std::size_t m) { return counts[m * size_ + self_]; };
  run(
      rounds_of(std::ranges::max(counts), per_round), deadline,
      [&](std::size_t round, Flight& flight) {
        flight.sent_counts.resize(size_);
        flight.received_counts.resize(size_);
        for (std::size_t m = 0; m < size_; ++m) {
          flight.sent_counts[m] = static_cast<int>(piece_of(sent_to(m), round, per_round));
          flight.received_counts[m] =
              static_cast<int>(piece_of(received_from(m), round, per_round));
        }
        make_room(flight.sent, set_offsets(flight.sent_counts, flight.sent_offsets));
        make_room(flight.received, set_offsets(flight.received_counts, flight.received_offsets));
        const std::byte* part = in.data();
        for (std::size_t m = 0; m < size_; ++m) {
          const auto bytes = static_cast<std::size_t>(flight.sent_counts[m]);
          if (bytes > 0) {
            std::memcpy(flight.sent.data() + flight.sent_offsets[m], part + round * per_round,
                        bytes);
          }
          resources_.count(bytes);
          part += sent_to(m);
        }
        library_.start_alltoall(flight.sent.data(), flight.sent_counts.data(),
                                flight.sent_offsets.data(), flight.received.data(),
                                flight.received_counts.data(), flight.received_offsets.data(),
                                communicator, flight.request);
      },
      [&](std::size_t round, Flight& flight) {
        std::byte* part = out.data();
        for (std::size_t m = 0; m < size_; ++m) {
          if (const auto bytes = static_cast<std::size_t>(flight.received_counts[m]); bytes > 0) {
            std::memcpy(part + round * per_round,
                        flight.received.data() + flight.received_offsets[m], bytes);
          }
          part += received_from(m);
        }
      });
}

}  // namespace polyhvd::mpi
