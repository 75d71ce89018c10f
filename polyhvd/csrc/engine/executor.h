// Runs agreed operations on a communicator: finds memory for what comes out, and cuts
// tensors into segments. The driver's.
#pragma once

#include <deque>
#include <utility>
#include <vector>

#include "control/operation.h"
#include "control/process_set.h"
#include "engine/backend.h"
#include "engine/controller.h"
#include "engine/parking.h"
#include "observe/lock_order.h"
#include "observe/timeline.h"

namespace polyhvd {

class Executor {
 public:
  // `devices` is null where there are only CPUs.
  Executor(const ProcessSets& sets, const Timeline& timeline, Parking& parking, Devices* devices);

  // Before the next work: resets transfer().
  void begin() noexcept { transfer_ = {}; }
  // `work` has no error. Outputs are complete when this returns, or, on a device, when the
  // operations' `arrived` is reached. `on_cpu` moves bytes of CPUs between the same members.
  void run(const Work& work, Communicator& communicator, Communicator& on_cpu, Deadline deadline);
  // Whether devices have done all that it has begun. Any thread. Throws Failure when a device has
  // failed.
  bool are_devices_done();
  // When bytes were on their way, where a timeline shows it.
  const Transfer& transfer() const noexcept { return transfer_; }

 private:
  void run_on_device(const Work& work, Communicator& communicator, Communicator& on_cpu,
                     Deadline deadline);
  void run_kind(const Work& work, Communicator& communicator, Communicator& on_cpu,
                Deadline deadline);
  void place_on_device(Operation& stand_in);
  void allreduce(const Work& work, Communicator& communicator, Deadline deadline);
  void allgather(const Work& work, Communicator& communicator, Deadline deadline);
  void broadcast(Operation& operation, Communicator& communicator, Deadline deadline);
  void reducescatter(const Work& work, Communicator& communicator, Deadline deadline);
  void alltoall(Operation& operation, Communicator& communicator, Communicator& on_cpu,
                Deadline deadline);
  void tell_number(Operation& operation);
  Segment output_of(Operation& operation, std::size_t index, const Shape& shape);
  TensorView allocate(Operation& operation, std::size_t index, const Shape& shape, DType dtype,
                      Device device);

  const ProcessSets& sets_;
  const Timeline& timeline_;
  Parking& parking_;
  Devices* const devices_;
  Transfer transfer_;
  // Of stand-ins: a device may still read them, and to free them would wait for that.
  std::deque<std::pair<DeviceEventPtr, OperationPtr>> in_use_;
  OrderedMutex<LockRank::arrivals> mutex_;
  std::deque<DeviceEventPtr> arrivals_;  // of what devices may still do; guarded by mutex_
  std::vector<Segment> in_;              // scratch
  std::vector<Segment> out_;             // scratch
  std::vector<Segment> results_;         // scratch
  std::vector<std::size_t> counts_;      // scratch
};

}  // namespace polyhvd
