// What executes agreed operations: one Backend per kind (host, later mpi and
// nccl), one Communicator per process set. Called by the thread that holds the
// driver's role, in the same order on every member.
//
// On a CPU an operation is done when the call returns. On a device the calls of one batch,
// between begin() and end(), may only have been given to a stream.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "control/device.h"
#include "control/process_set.h"
#include "control/tuning.h"
#include "control/types.h"
#include "engine/transport.h"

namespace polyhvd {

// Bytes by position in the process set: counts[m] belong to member m.
using Counts = std::span<const std::size_t>;

class Communicator {
 public:
  virtual ~Communicator() = default;

  // Reduces elementwise over the members. `in` and `out` are cut in the same way, cover
  // the same bytes, and may be the same memory segment by segment. How the
  // terms of an element are associated depends only on ranks and hosts.
  virtual void allreduce(Segments in, Segments out, DType dtype, ReduceOp op, Scale scale,
                         Deadline deadline) = 0;

  // Gives everybody the members' bytes: counts[m] of member m. `out` holds, for one member after
  // the other, as many segments as `in` has, cut as that member's `in` is. `in` may be this
  // member's part of `out`.
  virtual void allgather(Segments in, Segments out, Counts counts, Deadline deadline) = 0;

  // The same for bytes in one piece, which are concatenated in order of position.
  void allgather(ConstBytes in, Bytes out, Counts counts, Deadline deadline);

  // Copies the root's `in` (`root` is a position) into everybody's `out`, which
  // are cut in the same way on all members. Only the root reads `in`.
  virtual void broadcast(Segments in, Segments out, int root, Deadline deadline) = 0;

  // Reduces as allreduce does, and leaves each member its part: `out` covers
  // counts[self] bytes. `in` holds, for one member after the other, segments cut as
  // that member's `out` is. Every part is a whole number of elements.
  virtual void reducescatter(Segments in, Segments out, Counts counts, DType dtype, ReduceOp op,
                             Scale scale, Deadline deadline) = 0;

  // Sends member m the m-th of the parts that follow each other in `in`, and puts
  // what the members sent one after the other into `out`. counts[from * members +
  // to] are the bytes of every part, the same numbers on all members.
  virtual void alltoall(ConstBytes in, Bytes out, Counts counts, Deadline deadline) = 0;

  // These concern only devices, and a CPU has nothing to add to them.

  // What follows, up to end(), is for tensors of `device`, which hold their values once all
  // of `ready` are reached.
  virtual void begin(Device device, std::span<const DeviceEventPtr> ready, Deadline deadline) {
    (void)device, (void)ready, (void)deadline;
  }
  // The point where the device has done it all; null if that was so when the calls returned.
  virtual DeviceEventPtr end() { return nullptr; }
  // Called now and then, also while nothing is pending. Throws Failure over what the device
  // has begun and cannot end.
  virtual void check() {}
  // Other ranks leave in good order: returns when the device has done what it has begun, or check()
  // would throw.
  virtual void finish() noexcept {}
  // Whether a device still works on operations that have returned: abort() would end them without
  // their values.
  virtual bool is_working() noexcept { return false; }
  // The job has ended: lets go of what waits on a device for other ranks. No other calls follow.
  virtual void abort() noexcept {}
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const noexcept = 0;
  // For an allgather the dtype does not matter: several of them run as one.
  virtual bool supports(OpKind kind, DType dtype, ReduceOp op, DeviceKind device) const = 0;
  // Called for each process set that this rank is a member of, in order of id. `on_cpu` moves
  // bytes of CPUs between the same members and outlives the result; null when it is this one
  // that shall.
  virtual std::unique_ptr<Communicator> connect(ProcessSetId set, const Place& place,
                                                std::span<const int> members,
                                                Communicator* on_cpu) = 0;
  // Holds for the operations that follow, on every rank.
  virtual void tune(const Tuning&) {}
};

inline void Communicator::allgather(ConstBytes in, Bytes out, Counts counts, Deadline deadline) {
  const Segment own{const_cast<std::byte*>(in.data()), in.size()};  // only read
  std::vector<Segment> parts;
  parts.reserve(counts.size());
  for (std::size_t at = 0; const std::size_t bytes : counts) {
    parts.push_back({out.data() + at, bytes});
    at += bytes;
  }
  allgather(Segments(&own, 1), parts, counts, deadline);
}

}  // namespace polyhvd
