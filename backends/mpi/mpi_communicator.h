// Collectives of one process set, each as rounds of MPI's non-blocking ones. A round is
// packed into our memory, so that MPI never writes to a tensor after its operation
// has failed, and so that counts fit into MPI's int. While MPI moves one round, the next is
// packed.
//
// How MPI associates the terms of a sum is its own affair: bits may differ from those of the
// host backend, and between numbers of ranks, sizes and libraries.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "host/cursor.h"
#include "mpi/mpi_backend.h"

namespace polyhvd::mpi {

class MpiCommunicator final : public Communicator {
 public:
  // `members` are world ranks, this one among them.
  MpiCommunicator(Resources& resources, ProcessSetId set, std::span<const int> members);
  ~MpiCommunicator() override;

  void allreduce(Segments in, Segments out, DType dtype, ReduceOp op, Scale scale,
                 Deadline deadline) override;
  using Communicator::allgather;
  void allgather(Segments in, Segments out, Counts counts, Deadline deadline) override;
  void broadcast(Segments in, Segments out, int root, Deadline deadline) override;
  void reducescatter(Segments in, Segments out, Counts counts, DType dtype, ReduceOp op,
                     Scale scale, Deadline deadline) override;
  void alltoall(ConstBytes in, Bytes out, Counts counts, Deadline deadline) override;

 private:
  // MPI's communicator, which the first operation makes: that has a deadline, and may be
  // interrupted.
  Handle connected(Deadline deadline);
  template <class Begin, class End>
  void run(std::size_t rounds, Deadline deadline, Begin&& begin, End&& end);

  Resources& resources_;
  Library& library_;
  std::size_t allreduce_round_bytes_;  // the same on all members
  ProcessSetId set_;
  std::vector<int> members_;
  std::optional<Handle> communicator_;
  std::size_t size_;
  std::size_t self_;
  std::array<std::unique_ptr<Flight>, 2> flights_;
};

}  // namespace polyhvd::mpi
