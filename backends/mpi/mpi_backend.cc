#include "mpi/mpi_backend.h"

#include <algorithm>

#include "engine/poll_wait.h"
#include "mpi/mpi_communicator.h"
#include "mpi/mpi_transport.h"

namespace polyhvd::mpi {

Resources::Resources(std::shared_ptr<JobCommunicator> job, const host::Resources& host)
    : job_(std::move(job)), host_(host), reductions_(library()) {
  transport_ = std::make_unique<MpiTransport>(*this);
  bytes_only_.rank = host.rank;
  for (int rank = 0; rank < job_->size(); ++rank) {
    bytes_only_.domains.push_back({rank});
    bytes_only_.domain_of.push_back(rank);
  }
  bytes_only_.transport = transport_.get();
  bytes_only_.parking = host.parking;
  bytes_only_.reproducible = true;
  bytes_only_.overlap = [this] { overlap(); };
}

Resources::~Resources() {
  if (usable()) reductions_.close();
}

bool Resources::are_on_one_host(std::span<const int> ranks) const {
  const auto host_of = [this](int rank) { return host_.domain_of[static_cast<std::size_t>(rank)]; };
  return std::ranges::all_of(ranks, [&](int rank) { return host_of(rank) == host_of(ranks[0]); });
}

template <class Wait>
void Resources::give_up_after(Wait&& wait) {
  try {
    wait();
  } catch (...) {
    job_->runtime().give_up();
    throw;
  }
}

void Resources::await(Flight& flight, Deadline deadline) {
  const auto has_landed = [&] {
    if (!library().test(flight.request)) return false;
    flight.flying = false;
    return true;
  };
  give_up_after([&] { poll_wait(*host_.parking, has_landed, deadline); });
  host_.parking->sleep_lightly();  // for what others still wait for
}

void Resources::await(const BlockingCall& call, Deadline deadline) {
  // Nothing wakes us when MPI returns. It may spin there and need the cores: no naps of
  // microseconds.
  host_.parking->sleep_lightly();
  const auto has_returned = [&] { return call.is_finished(); };
  calling_ = true;  // and stays so when the wait is given up, as MPI is then
  try {
    give_up_after([&] { host_.parking->await(has_returned, deadline); });
  } catch (const Failure& failure) {
    if (failure.error().code != ErrorCode::kTimeout) throw;
    throw Failure(
        ErrorCode::kTimeout,
        call.name() + " did not return in time: a rank of the process set did not call it");
  }
  calling_ = false;
  call.check();
}

// Depends only on what all ranks have in common: they must make the same choice.
bool MpiBackend::supports(OpKind kind, DType dtype, ReduceOp op, DeviceKind device) const {
  if (resources_.reproducible()) return bytes_only_.supports(kind, dtype, op, device);
  return bytes_only_.supports(kind, dtype, op, device) &&
         (!reduces(kind) || op != ReduceOp::kAdasum);
}

std::unique_ptr<Communicator> MpiBackend::connect(ProcessSetId set, const Place& place,
                                                  std::span<const int> members,
                                                  Communicator* on_cpu) {
  if (resources_.reproducible()) return bytes_only_.connect(set, place, members, on_cpu);
  return std::make_unique<MpiCommunicator>(resources_, set, members);
}

}  // namespace polyhvd::mpi
