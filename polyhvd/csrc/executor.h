// Runs agreed operations on a communicator: finds memory for what comes out, and cuts
// tensors into segments. The driver's.
#pragma once

#include <vector>

#include "backend.h"
#include "controller.h"
#include "operation.h"
#include "parking.h"
#include "process_set.h"
#include "timeline.h"

namespace polyhvd {

class Executor {
 public:
  Executor(const ProcessSets& sets, const Timeline& timeline, Parking& parking);

  // Before the next work: forgets what transfer() says.
  void begin() noexcept { transfer_ = {}; }
  // `work` has no error. Outputs are complete when this returns.
  void run(const Work& work, Communicator& communicator, Deadline deadline);
  // When bytes were on their way, where a timeline shows it.
  const Transfer& transfer() const noexcept { return transfer_; }

 private:
  void allreduce(const Work& work, Communicator& communicator, Deadline deadline);
  void allgather(Operation& operation, Communicator& communicator, Deadline deadline);
  void broadcast(Operation& operation, Communicator& communicator, Deadline deadline);
  void reducescatter(Operation& operation, Communicator& communicator, Deadline deadline);
  void alltoall(Operation& operation, Communicator& communicator, Deadline deadline);
  void tell_number(Operation& operation);
  TensorView output_of(Operation& operation, std::size_t index, const Shape& shape);
  TensorView allocate(Operation& operation, std::size_t index, const Shape& shape, DType dtype);

  const ProcessSets& sets_;
  const Timeline& timeline_;
  Parking& parking_;
  Transfer transfer_;
  std::vector<Segment> in_;       // scratch
  std::vector<Segment> out_;      // scratch
  std::vector<Segment> results_;  // scratch
};

}  // namespace polyhvd
