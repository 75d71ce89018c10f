#include "engine/executor.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <string>

#include "control/disagreement.h"
#include "control/wire.h"

namespace polyhvd {
namespace {

std::size_t bytes_of(const Shape& shape, DType dtype) {
  return static_cast<std::size_t>(element_count(shape)) * item_size(dtype);
}

Segment segment_of(const TensorView& tensor) {
  return {static_cast<std::byte*>(tensor.data), bytes_of(tensor.shape, tensor.dtype)};
}

// The rows of a reducescatter that `member` keeps, where they lie in the input.
Segment part_of(const TensorView& input, int member, int members) {
  const std::int64_t rows = input.shape[0];
  Shape shape = input.shape;
  shape[0] = 1;
  const std::size_t row_bytes = bytes_of(shape, input.dtype);
  std::int64_t first = 0;
  for (int m = 0; m < member; ++m) first += rows_kept(rows, m, members);
  return {static_cast<std::byte*>(input.data) + static_cast<std::size_t>(first) * row_bytes,
          static_cast<std::size_t>(rows_kept(rows, member, members)) * row_bytes};
}

// Rejects a table of an alltoall that no rank can have sent. Its entries determine where in memory
// bytes go, and between hosts it has no MAC, because it travels like a tensor.
void require_possible(std::span<const std::int64_t> rows, std::span<const int> ranks,
                      std::size_t self, std::int64_t row_elements) {
  std::int64_t most_here = kElementsMax / std::max<std::int64_t>(row_elements, 1);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::size_t to = i % ranks.size();
    std::int64_t most = std::numeric_limits<std::int32_t>::max();
    if (to == self) most = std::min(most, most_here);
    if (rows[i] < kNoRows || rows[i] > most) {
      throw Failure(ErrorCode::kPeerLost,
                    concat({"data from rank ", std::to_string(ranks[i / ranks.size()]),
                            " cannot be trusted: it announces ", std::to_string(rows[i]),
                            " rows for rank ", std::to_string(ranks[to]), ", expected 0 to ",
                            std::to_string(most), "; check the network between them"}));
    }
    if (to == self) most_here -= std::max<std::int64_t>(rows[i], 0);
  }
}

// One after the other when there are several: a group may have tensors of each.
template <class Use>
void for_each_dtype(const Submission& s, Use&& use) {
  const DType first = s.inputs[0].dtype;
  if (std::ranges::all_of(s.inputs, [&](const TensorView& t) { return t.dtype == first; })) {
    return use(first);
  }
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    if (std::ranges::count(s.inputs, dtype, &TensorView::dtype) > 0) use(dtype);
  }
}

// Times the calls of a communicator, where a timeline shows them.
class TransferTimer {
 public:
  TransferTimer(const Timeline& timeline, Parking& parking, Transfer& transfer)
      : parking_(parking), transfer_(transfer), on_(timeline.on()) {
    if (!on_) return;
    parking_.measure_waits(true);
    waited_before_ = parking_.waited();
    if (transfer_.begin == 0) transfer_.begin = ticks_now();
  }
  ~TransferTimer() {
    if (!on_) return;
    parking_.measure_waits(false);
    transfer_.waited += parking_.waited() - waited_before_;
    transfer_.end = ticks_now();
  }
  TransferTimer(const TransferTimer&) = delete;
  TransferTimer& operator=(const TransferTimer&) = delete;

 private:
  Parking& parking_;
  Transfer& transfer_;
  const bool on_;
  Ticks waited_before_ = 0;
};

}  // namespace

Executor::Executor(const ProcessSets& sets, const Timeline& timeline, Parking& parking,
                   Devices* devices)
    : sets_(sets), timeline_(timeline), parking_(parking), devices_(devices) {}

void Executor::run(const Work& work, Communicator& communicator, Communicator& on_cpu,
                   Deadline deadline) {
  if (device_of(work.operations[0]->submission).kind == DeviceKind::kCpu) {
    return run_kind(work, communicator, communicator, deadline);
  }
  run_on_device(work, communicator, on_cpu, deadline);
}

void Executor::run_on_device(const Work& work, Communicator& communicator, Communicator& on_cpu,
                             Deadline deadline) {
  while (!in_use_.empty() && in_use_.front().first->reached()) in_use_.pop_front();
  std::vector<DeviceEventPtr> ready;
  for (const OperationPtr& operation : work.operations) {
    if (operation->stands_in) place_on_device(*operation);
    if (operation->submission.ready) ready.push_back(operation->submission.ready);
  }
  communicator.begin(device_of(work.operations[0]->submission), ready, deadline);
  run_kind(work, communicator, on_cpu, deadline);
  const DeviceEventPtr arrived = communicator.end();
  if (arrived) {
    const std::lock_guard lock(mutex_);
    while (!arrivals_.empty() && arrivals_.front()->reached()) arrivals_.pop_front();
    arrivals_.push_back(arrived);
  }
  for (const OperationPtr& operation : work.operations) {
    operation->arrived = arrived;
    const Submission& s = operation->submission;
    if (s.orders_stream && arrived) arrived->hold(s.stream);
    if (operation->stands_in && arrived) in_use_.emplace_back(arrived, operation);
  }
}

bool Executor::are_devices_done() {
  const std::lock_guard lock(mutex_);
  while (!arrivals_.empty() && arrivals_.front()->reached()) arrivals_.pop_front();
  return arrivals_.empty();
}

// A rank that has joined made its terms in memory of the CPU, of no device in particular.
void Executor::place_on_device(Operation& operation) {
  Submission& s = operation.submission;
  const Device device = devices_->own(s.inputs[0].device.kind);
  for (std::size_t i = 0; i < s.inputs.size(); ++i) {
    TensorView& input = s.inputs[i];
    const Segment from = segment_of(input);
    auto memory = devices_->allocate(device, from.bytes);
    devices_->copy_in(device, memory.get(), from.data, from.bytes);
    operation.inputs[i] =
        std::make_shared<OwnedBuffer>(input.shape, input.dtype, device, std::move(memory));
    input.data = operation.inputs[i]->data();
    input.device = device;
  }
  if (!s.outputs.empty()) s.outputs = s.inputs;
}

void Executor::run_kind(const Work& work, Communicator& communicator, Communicator& on_cpu,
                        Deadline deadline) {
  Operation& first = *work.operations[0];
  switch (first.submission.kind) {
    case OpKind::kAllreduce:
      return allreduce(work, communicator, deadline);
    case OpKind::kAllgather:
      return allgather(work, communicator, deadline);
    case OpKind::kBroadcast:
      return broadcast(first, communicator, deadline);
    case OpKind::kReducescatter:
      return reducescatter(work, communicator, deadline);
    case OpKind::kAlltoall:
      return alltoall(first, communicator, on_cpu, deadline);
    case OpKind::kJoin:
      if (first.submission.allocate) tell_number(first);
      return;
    default:
      return;  // to have agreed is all
  }
}

Segment Executor::output_of(Operation& operation, std::size_t index, const Shape& shape) {
  const Submission& s = operation.submission;
  const DType dtype = s.inputs[index].dtype;
  if (s.outputs.empty()) {
    return segment_of(allocate(operation, index, shape, dtype, s.inputs[index].device));
  }
  if (s.outputs[index].shape != shape || s.outputs[index].dtype != dtype) {
    throw Failure(ErrorCode::kInternal,
                  "the output passed for '" + s.name + "' does not have the agreed shape");
  }
  return segment_of(s.outputs[index]);
}

TensorView Executor::allocate(Operation& operation, std::size_t index, const Shape& shape,
                              DType dtype, Device device) {
  const Submission& s = operation.submission;
  if (s.allocate) {
    void* data = s.allocate(static_cast<int>(index), shape);
    if (data == nullptr && bytes_of(shape, dtype) > 0) {
      throw Failure(ErrorCode::kInternal, "no memory for the output of '" + s.name + "'");
    }
    return {data, shape, dtype, device};
  }
  const std::size_t bytes = bytes_of(shape, dtype);
  operation.buffers.push_back(
      device.kind == DeviceKind::kCpu
          ? std::make_shared<OwnedBuffer>(shape, dtype, bytes)
          : std::make_shared<OwnedBuffer>(shape, dtype, device, devices_->allocate(device, bytes)));
  return {operation.buffers.back()->data(), shape, dtype, device};
}

void Executor::tell_number(Operation& operation) {
  const auto number = static_cast<std::int32_t>(operation.number);
  std::memcpy(allocate(operation, 0, {}, DType::kInt32, Device{}).data, &number, sizeof number);
}

void Executor::allreduce(const Work& work, Communicator& communicator, Deadline deadline) {
  results_.clear();
  for (const OperationPtr& operation : work.operations) {
    const Submission& s = operation->submission;
    for (std::size_t i = 0; i < s.inputs.size(); ++i) {
      results_.push_back(output_of(*operation, i, s.inputs[i].shape));
    }
  }
  const Operation& first = *work.operations[0];
  const TransferTimer timer(timeline_, parking_, transfer_);
  for_each_dtype(first.submission, [&](DType dtype) {
    in_.clear();
    out_.clear();
    auto out = results_.begin();
    for (const OperationPtr& operation : work.operations) {
      for (const TensorView& input : operation->submission.inputs) {
        const Segment& output = *out++;
        if (input.dtype != dtype) continue;
        in_.push_back(segment_of(input));
        out_.push_back(output);
      }
    }
    communicator.allreduce(in_, out_, dtype, first.submission.op, first.submission.scale, deadline);
  });
}

// Each output is in one piece, and the members' parts of it follow each other there; of a batch
// the communicator wants all parts of the first member, then all of the next.
void Executor::allgather(const Work& work, Communicator& communicator, Deadline deadline) {
  const std::size_t members = sets_.members(work.process_set).size();
  std::size_t parts = 0;
  for (const OperationPtr& operation : work.operations) {
    parts += operation->submission.inputs.size();
  }
  in_.clear();
  out_.resize(members * parts);
  counts_.assign(members, 0);
  for (const OperationPtr& operation : work.operations) {
    const std::vector<TensorView>& inputs = operation->submission.inputs;
    if (operation->submission.sized) operation->submission.sized(operation->rows);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Shape shape = inputs[i].shape;
      shape[0] = 1;
      const std::size_t row_bytes = bytes_of(shape, inputs[i].dtype);
      shape[0] = 0;
      for (std::size_t m = 0; m < members; ++m) shape[0] += operation->rows[m * inputs.size() + i];
      std::byte* part = output_of(*operation, i, shape).data;
      for (std::size_t m = 0; m < members; ++m) {
        const auto rows = static_cast<std::size_t>(operation->rows[m * inputs.size() + i]);
        out_[m * parts + in_.size()] = {part, rows * row_bytes};
        counts_[m] += rows * row_bytes;
        part += rows * row_bytes;
      }
      in_.push_back(segment_of(inputs[i]));
    }
  }
  const TransferTimer timer(timeline_, parking_, transfer_);
  communicator.allgather(in_, out_, counts_, deadline);
}

void Executor::broadcast(Operation& operation, Communicator& communicator, Deadline deadline) {
  const Submission& s = operation.submission;
  in_.clear();
  out_.clear();
  for (std::size_t i = 0; i < s.inputs.size(); ++i) {
    in_.push_back(segment_of(s.inputs[i]));
    out_.push_back(output_of(operation, i, s.inputs[i].shape));
  }
  const int root = *position_in(sets_.members(s.process_set), s.root);
  const TransferTimer timer(timeline_, parking_, transfer_);
  communicator.broadcast(in_, out_, root, deadline);
}

void Executor::reducescatter(const Work& work, Communicator& communicator, Deadline deadline) {
  const auto members = static_cast<int>(sets_.members(work.process_set).size());
  results_.clear();
  for (const OperationPtr& operation : work.operations) {
    const Submission& s = operation->submission;
    for (std::size_t i = 0; i < s.inputs.size(); ++i) {
      Shape shape = s.inputs[i].shape;
      shape[0] = rows_kept(shape[0], operation->position, members);
      results_.push_back(output_of(*operation, i, shape));
    }
  }
  const Submission& first = work.operations[0]->submission;
  const TransferTimer timer(timeline_, parking_, transfer_);
  for_each_dtype(first, [&](DType dtype) {
    in_.clear();
    out_.clear();
    counts_.assign(static_cast<std::size_t>(members), 0);
    auto result = results_.begin();
    for (int m = 0; m < members; ++m) {
      for (const OperationPtr& operation : work.operations) {
        for (const TensorView& input : operation->submission.inputs) {
          if (m == 0) {
            if (input.dtype == dtype) out_.push_back(*result);
            ++result;
          }
          if (input.dtype != dtype) continue;
          const Segment part = part_of(input, m, members);
          counts_[static_cast<std::size_t>(m)] += part.bytes;
          in_.push_back(part);
        }
      }
    }
    communicator.reducescatter(in_, out_, counts_, dtype, first.op, first.scale, deadline);
  });
}

// How many rows go where changes from call to call, so it is not negotiated: it
// travels with the data. The numbers of received rows are on the CPU, wherever the tensor is.
void Executor::alltoall(Operation& operation, Communicator& communicator, Communicator& on_cpu,
                        Deadline deadline) {
  const Submission& s = operation.submission;
  const TensorView& input = s.inputs[0];
  const std::size_t members = sets_.members(s.process_set).size();
  const auto self = static_cast<std::size_t>(operation.position);
  std::vector<std::int64_t> splits = s.numbers;
  splits.resize(members,
                s.numbers.empty() ? input.shape[0] / static_cast<std::int64_t>(members) : 0);
  if (operation.stands_in) splits.assign(members, kNoRows);
  const TransferTimer timer(timeline_, parking_, transfer_);
  std::vector<std::int64_t> rows(members * members);
  const std::vector<std::size_t> row_of_table(members, members * sizeof(std::int64_t));
  on_cpu.allgather(std::as_bytes(std::span(splits)), std::as_writable_bytes(std::span(rows)),
                   row_of_table, deadline);

  Shape shape = input.shape;
  shape[0] = 1;
  require_possible(rows, sets_.members(s.process_set), self, element_count(shape));
  const std::size_t row_bytes = bytes_of(shape, input.dtype);
  std::vector<std::size_t> counts(rows.size());
  std::vector<std::int32_t> received(members);
  std::vector<std::int64_t> sized_rows(s.sized ? members : 0);
  shape[0] = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    const std::int64_t count = std::max<std::int64_t>(rows[i], 0);  // of kNoRows, too
    counts[i] = static_cast<std::size_t>(count) * row_bytes;
    if (i % members != self) continue;
    received[i / members] = static_cast<std::int32_t>(count);
    if (s.sized) sized_rows[i / members] = rows[i];
    shape[0] += count;
  }
  if (s.sized) s.sized(sized_rows);
  const Segment out = segment_of(allocate(operation, 0, shape, input.dtype, input.device));
  const Segment in = segment_of(input);
  communicator.alltoall({in.data, in.bytes}, {out.data, out.bytes}, counts, deadline);
  const Shape one_each{static_cast<std::int64_t>(members)};
  const TensorView table = allocate(operation, 1, one_each, DType::kInt32, Device{});
  std::memcpy(table.data, received.data(), members * sizeof(std::int32_t));
}

}  // namespace polyhvd
