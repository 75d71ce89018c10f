// The backend that lets MPI move bytes between CPUs, and reduce. In reproducible mode MPI
// moves the bytes of the host backend's algorithms instead, and our kernels add.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "engine/backend.h"
#include "engine/parking.h"
#include "host/host_backend.h"
#include "mpi/reductions.h"
#include "mpi/runtime.h"

namespace polyhvd::mpi {

// One operation that MPI has begun. MPI reads and writes these until it is done.
struct Flight {
  std::vector<std::byte> sent;
  std::vector<std::byte> received;
  std::vector<int> sent_counts;
  std::vector<int> sent_offsets;
  std::vector<int> received_counts;
  std::vector<int> received_offsets;
  Handle request;
  bool flying = false;
};

// What a rank's communicators share. Everything outlives them.
class Resources {
 public:
  // `host` is this rank's, for what does not depend on MPI.
  Resources(std::shared_ptr<JobCommunicator> job, const host::Resources& host);
  ~Resources();
  Resources(const Resources&) = delete;
  Resources& operator=(const Resources&) = delete;

  JobCommunicator& job() const noexcept { return *job_; }
  Library& library() const noexcept { return job_->library(); }
  bool usable() const noexcept { return job_->runtime().usable(); }
  Reductions& reductions() noexcept { return reductions_; }
  // Ranks that share nothing but MPI.
  host::Resources& bytes_only() noexcept { return bytes_only_; }

  // The same on all ranks.
  bool are_on_one_host(std::span<const int> ranks) const;

  // Returns when the flight has landed. Throws as Parking does; then it still flies, and MPI is
  // given up.
  void await(Flight& flight, Deadline deadline);
  // The same for a call that waits for other ranks; throws what it has thrown, too.
  void await(const BlockingCall& call, Deadline deadline);
  // What was sent may still lie with this rank, after its operation: Open MPI and MPICH send on
  // while they are called, and no thread may call them for long. Not beside calls of the program's,
  // where MPI serves one thread at a time, nor beside a call that another thread of ours waits in.
  void move_along(bool pending) {
    if (!usable()) return;
    if (job_->runtime().threads() != ThreadLevel::kMultiple && (!pending || calling_)) return;
    library().move_along(job_->communicator());
  }
  // Moves control traffic along, between the steps of a long transfer.
  void overlap() const { host_.overlap(); }
  bool reproducible() const noexcept { return host_.reproducible; }

  void count(std::size_t bytes) noexcept { bytes_.fetch_add(bytes, std::memory_order_relaxed); }
  std::uint64_t bytes() const noexcept { return bytes_.load(std::memory_order_relaxed); }

 private:
  // Waits; when the wait fails, MPI is used no more.
  template <class Wait>
  void give_up_after(Wait&& wait);

  std::shared_ptr<JobCommunicator> job_;
  bool calling_ = false;  // await(BlockingCall) waits; the driver's
  const host::Resources& host_;
  Reductions reductions_;
  std::unique_ptr<Transport> transport_;
  host::Resources bytes_only_;
  std::atomic<std::uint64_t> bytes_{0};  // that this rank gave to MPI; any thread reads it
};

class MpiBackend final : public Backend {
 public:
  explicit MpiBackend(Resources& resources)
      : resources_(resources), bytes_only_(resources.bytes_only()) {}
  std::string_view name() const noexcept override { return "mpi"; }
  bool supports(OpKind kind, DType dtype, ReduceOp op, DeviceKind device) const override;
  std::unique_ptr<Communicator> connect(ProcessSetId set, const Place& place,
                                        std::span<const int> members,
                                        Communicator* on_cpu) override;
  void tune(const Tuning& tuning) override { bytes_only_.tune(tuning); }

 private:
  Resources& resources_;
  host::HostBackend bytes_only_;
};

}  // namespace polyhvd::mpi
