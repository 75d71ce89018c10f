#include "api/native_api.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "control/disagreement.h"
#include "control/error.h"

namespace polyhvd {
namespace {

constexpr auto kLastOpKind = static_cast<OpKind>(kOpKindCount - 1);

[[noreturn]] void refuse(const std::string& why) {
  throw Failure(ErrorCode::kInvalidArgument, why);
}

// `value` is a number of an enumeration whose last one is `last`.
template <class Enum>
Enum checked(std::int32_t value, Enum last, const char* what) {
  if (value < 0 || value > static_cast<std::int32_t>(last)) {
    refuse("a native adapter's submission has no " + std::string(what) + " " +
           std::to_string(value) + ", an error in the adapter");
  }
  return static_cast<Enum>(value);
}

void require(bool holds, const char* what) {
  if (!holds) {
    refuse(std::string("a native adapter's submission ") + what + ", an error in the adapter");
  }
}

TensorView view_of(const polyhvd_tensor& t) {
  require(t.ndim >= 0 && (t.ndim == 0 || t.shape != nullptr), "has a tensor without a shape");
  const auto dtype = checked(t.dtype, static_cast<DType>(kDTypeCount - 1), "dtype");
  const auto device = checked(t.device_kind, DeviceKind::kCuda, "kind of device");
  const Shape shape(t.shape, t.shape + t.ndim);
  require(t.data != nullptr || element_count(shape) == 0, "has a tensor without memory");
  return {t.data, shape, dtype, {device, t.device_index}};
}

void read_tensors(const polyhvd_submission& in, Submission& s) {
  require(in.count >= 0 && (in.count == 0 || in.inputs != nullptr), "lacks its inputs");
  const auto count = static_cast<std::size_t>(in.count);
  s.inputs.reserve(count);
  if (in.outputs != nullptr) s.outputs.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    s.inputs.push_back(view_of(in.inputs[i]));
    if (in.outputs != nullptr) s.outputs.push_back(view_of(in.outputs[i]));
  }
}

void read_order(const polyhvd_submission& in, Submission& s) {
  const bool on_device = device_of(s).kind != DeviceKind::kCpu;
  if (!on_device && (in.stream != nullptr || in.event != nullptr)) {
    refuse(std::string(name_of(s.kind)) + " '" + s.name + "': a stream and an event are " +
           "unsupported with tensors of the host; leave both null");
  }
  s.stream = in.stream;
  s.event = in.event;
  s.orders_stream = on_device;
}

Submission submission_of(const polyhvd_submission& in) {
  Submission s;
  s.kind = checked(in.kind, kLastOpKind, "kind");
  s.op = reduces(s.kind) ? checked(in.op, ReduceOp::kProduct, "reduction")
                         : static_cast<ReduceOp>(in.op);
  require(in.done != nullptr, "lacks done()");
  in.name == nullptr ? leave_unnamed(s) : void((s.name = in.name, s.turn = in.turn));
  s.root = in.root;
  s.priority = in.priority;
  s.scale = {in.prescale, in.postscale};
  s.process_set = in.process_set;
  s.queue_duplicates = in.queue_duplicates != 0;
  require(in.number_count >= 0, "has a negative count of numbers");
  if (in.numbers != nullptr) s.numbers.assign(in.numbers, in.numbers + in.number_count);
  if (in.where != nullptr) s.where = in.where;
  read_tensors(in, s);
  read_order(in, s);
  void* context = in.context;
  if (in.outputs == nullptr && in.allocate != nullptr) {
    s.allocate = [context, allocate = in.allocate](int index, const Shape& shape) {
      return allocate(context, index, shape.data(), static_cast<std::int32_t>(shape.size()));
    };
  }
  if (in.sized != nullptr) {
    s.sized = [context, sized = in.sized](std::span<const std::int64_t> rows) {
      sized(context, rows.data(), static_cast<std::int32_t>(rows.size()));
    };
  }
  s.done = [context, done = in.done](const Error* error) {
    if (error == nullptr) return done(context, 0, nullptr);
    done(context, static_cast<std::int32_t>(error->code), without_controls(error->message).c_str());
  };
  return s;
}

}  // namespace

NativeApi::NativeApi(Engine& engine, std::uint64_t generation) noexcept
    : engine_(engine),
      table_{
          POLYHVD_C_API_VERSION, sizeof(polyhvd_engine_api), generation, this, &NativeApi::submit,
          &NativeApi::lend} {}

void NativeApi::require_generation(std::uint64_t made_for, OpKind kind, const char* name) const {
  if (made_for == 0 || made_for == generation()) return;
  std::string text(name_of(kind));
  text += name == nullptr || *name == '\0' ? " without a name" : " '" + std::string(name) + "'";
  text += " was made for generation " + std::to_string(made_for) +
          " of the world, which has ended; generation " + std::to_string(generation()) +
          " is running now. Compute it again: an operation that was started before a shutdown() "
          "cannot be continued after the next init()";
  throw Failure(ErrorCode::kPeerLost, std::move(text));
}

std::int32_t NativeApi::submit(void* self, const polyhvd_submission* submission, char* message,
                               std::size_t message_bytes) noexcept {
  Error error;
  try {
    auto& own = *static_cast<NativeApi*>(self);
    require(submission != nullptr && submission->size == sizeof(polyhvd_submission),
            "is of another version of the C interface");
    const auto kind = checked(submission->kind, kLastOpKind, "kind");
    own.require_generation(submission->generation, kind, submission->name);
    if (submission->lends != nullptr) {
      *submission->lends = own.engine_.submit_lending(submission_of(*submission)) ? 1 : 0;
    } else {
      own.engine_.submit(submission_of(*submission));
    }
    return 0;
  } catch (const Failure& failure) {
    error = failure.error();
  } catch (const std::exception& other) {
    error = {ErrorCode::kInternal, other.what()};
  }
  if (message != nullptr && message_bytes > 0) {
    const std::string text = without_controls(error.message);
    const std::size_t n = std::min(text.size(), message_bytes - 1);
    std::memcpy(message, text.data(), n);
    message[n] = '\0';
  }
  return static_cast<std::int32_t>(error.code);
}

void NativeApi::lend(void* self) noexcept { static_cast<NativeApi*>(self)->engine_.lend(); }

}  // namespace polyhvd
