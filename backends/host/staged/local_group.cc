#include "host/staged/local_group.h"

#include <algorithm>
#include <numeric>

namespace polyhvd::host {

namespace {

constexpr int kStepBits = 42;  // of the steps of one turn: 50 days at a microsecond each

}  // namespace

LocalGroup::LocalGroup(Resources& resources, shm::Staging staging, const Place& place,
                       std::vector<int> locals, int self)
    : resources_(resources),
      staging_(staging),
      locals_(std::move(locals)),
      self_(self),
      removals_(place.removals),
      first_(place.turn << kStepBits),
      step_(first_) {
  for (const int local : locals_) ranks_.push_back(world_rank(local));
}

void LocalGroup::wake_others() {
  for (int m = 0; m < size(); ++m) {
    if (m == self_) continue;
    // All have agreed on the operation in progress: ranks that do not drive wait.
    resources_.peers->wake(locals_[static_cast<std::size_t>(m)], Parking::kWaiting);
  }
}

void LocalGroup::await_counter(const shm::Counter* counters, int member, std::uint64_t value,
                               Deadline deadline) {
  // Sequentially consistent, as the publisher's store: see Parking's sleep flag.
  const shm::Counter& counter = counters[member];
  if (counter.value.load() >= value) return;
  const int rank = ranks_[static_cast<std::size_t>(member)];
  const Parking::WaitFor wait(*resources_.parking, rank);
  try {
    resources_.parking->await([&] { return counter.value.load() >= value; }, deadline);
  } catch (const Failure& failure) {
    // A stall that ends the job is reported as such.
    if (failure.error().code != ErrorCode::kTimeout || Parking::Clock::now() < deadline) throw;
    fail_late(rank);
  }
}

int LocalGroup::world_rank(int local) const {
  const int domain = resources_.domain_of[static_cast<std::size_t>(resources_.rank)];
  return resources_.domains[static_cast<std::size_t>(domain)][static_cast<std::size_t>(local)];
}

void LocalGroup::fail_late(int rank) const {
  throw Failure(ErrorCode::kTimeout, "rank " + std::to_string(rank) +
                                         " agreed to the transfer but did not take part in it in "
                                         "time; it may be suspended, or get too little CPU time");
}

// All execute removals, and in the same order: no rank that is still before that one waits for us.
void LocalGroup::take_over(Deadline deadline) {
  const auto domain =
      static_cast<std::size_t>(resources_.domain_of[static_cast<std::size_t>(resources_.rank)]);
  const auto ranks_here = static_cast<int>(resources_.domains[domain].size());
  for (int local = 0; local < ranks_here; ++local) {
    const int rank = world_rank(local);
    if (rank == resources_.rank) continue;
    const std::atomic<std::uint64_t>& removals = resources_.segment->removals(local);
    if (removals.load() >= removals_) continue;
    const Parking::WaitFor wait(*resources_.parking, rank);
    try {
      resources_.parking->await([&] { return removals.load() >= removals_; }, deadline);
    } catch (const Failure& failure) {
      if (failure.error().code != ErrorCode::kTimeout || Parking::Clock::now() < deadline) throw;
      fail_late(rank);
    }
  }
}

void LocalGroup::await_free(std::uint64_t step, Deadline deadline) {
  // A member that has begun step t has finished step t - 2: the chunked
  // allreduce copies results out one step late.
  constexpr std::uint64_t kLead = shm::kSlots - 3;
  if (step == first_ && removals_ > 0 && size() > 1) take_over(deadline);
  if (step - first_ < shm::kSlots) return;
  for (int m = 0; m < size(); ++m) {
    if (m != self_) await_counter(staging_.begun, m, step - kLead, deadline);
  }
}

void LocalGroup::publish_begun(std::uint64_t step, std::size_t bytes) {
  if (size() == 1) return;
  resources_.shm_bytes.fetch_add(bytes, std::memory_order_relaxed);
  staging_.begun[self_].value.store(step + 1);
  wake_others();
}

void LocalGroup::publish_reduced(std::uint64_t step) {
  if (size() == 1) return;
  staging_.reduced[self_].value.store(step + 1);
  wake_others();
}

void LocalGroup::await_begun(std::uint64_t step, Deadline deadline) {
  for (int m = 0; m < size(); ++m) {
    if (m != self_) await_counter(staging_.begun, m, step + 1, deadline);
  }
}

void LocalGroup::await_begun_by(int member, std::uint64_t step, Deadline deadline) {
  await_counter(staging_.begun, member, step + 1, deadline);
}

void LocalGroup::await_reduced_by(int member, std::uint64_t step, Deadline deadline) {
  await_counter(staging_.reduced, member, step + 1, deadline);
}

void LocalGroup::spread(std::span<const std::size_t> bytes, Cursor source, std::span<Cursor> sinks,
                        Deadline deadline) {
  if (size() == 1) return;
  const std::size_t unit = staging_.region_bytes();
  const std::size_t most = *std::ranges::max_element(bytes);
  if (std::reduce(bytes.begin(), bytes.end()) >= kOutputsPastCachesMin) {
    for (Cursor& sink : sinks) sink.pass_caches();
  }
  for (std::size_t at = 0; at < most; at += unit) {
    const auto count = [&](int m) {
      const std::size_t total = bytes[static_cast<std::size_t>(m)];
      return at < total ? std::min(unit, total - at) : 0;
    };
    await_free(step_, deadline);
    source.stage_inputs(writer_, staging_.region(self_, step_), count(self_));
    publish_begun(step_, count(self_));
    for (int m = 0; m < size(); ++m) {
      if (m == self_ || count(m) == 0) continue;
      await_begun_by(m, step_, deadline);
      sinks[static_cast<std::size_t>(m)].copy_to_outputs(staging_.region(m, step_), count(m));
    }
    advance();
    resources_.overlap();
  }
}

}  // namespace polyhvd::host
