#include "nccl/connection.h"

#include <future>
#include <thread>

#include "engine/poll_wait.h"

namespace polyhvd::nccl {
namespace {

using Clock = std::chrono::steady_clock;
// Kernels look at the flag all the time; a network may take longer to let go.
constexpr auto kAbortTime = std::chrono::seconds(2);
constexpr auto kNap = std::chrono::microseconds(100);

}  // namespace

void Connection::begin(const UniqueId& id, int size, int position) {
  CommConfig config;
  check("ncclCommInitRankConfig",
        library_->call.CommInitRankConfig(&comm_, size, id, position, &config));
}

Result Connection::state() const {
  Result state = Result::kSuccess;
  const Result asked = library_->call.CommGetAsyncError(comm_, &state);
  return asked == Result::kSuccess ? state : asked;
}

Error Connection::error_of(const char* what, Result result) const {
  return {result == Result::kRemoteError ? ErrorCode::kPeerLost : ErrorCode::kInternal,
          label_ + ": " + what + " of NCCL " + version_text(library_->version()) +
              " failed: " + library_->words(result, comm_) +
              "; set NCCL_DEBUG=WARN in the environment for details"};
}

void Connection::settle(const char* what, Parking& parking, Deadline deadline) {
  Result now = state();
  if (now == Result::kInProgress) {
    const auto settled = [&] { return (now = state()) != Result::kInProgress; };
    try {
      poll_wait(parking, settled, deadline);
    } catch (const Failure& failure) {
      if (failure.error().code != ErrorCode::kTimeout) throw;
      throw Failure(ErrorCode::kTimeout,
                    label_ + ": " + what +
                        " of NCCL did not finish in time; look for a rank that hangs, check "
                        "NCCL_SOCKET_IFNAME and firewalls, and read the output of NCCL_DEBUG=INFO; "
                        "POLYHVD_DATA_TIMEOUT_SECONDS sets the limit");
    }
  }
  if (now != Result::kSuccess) throw Failure(error_of(what, now));
}

std::optional<Error> Connection::trouble() const {
  if (comm_ == nullptr) return std::nullopt;
  const Result now = state();
  if (now == Result::kSuccess || now == Result::kInProgress) return std::nullopt;
  return error_of("an operation", now);
}

bool Connection::close(Deadline deadline) noexcept {
  const Result begun = library_->call.CommFinalize(comm_);
  if (begun != Result::kSuccess && begun != Result::kInProgress) return false;
  while (state() == Result::kInProgress) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(kNap);
  }
  if (state() != Result::kSuccess) return false;
  (void)library_->call.CommDestroy(std::exchange(comm_, nullptr));
  return true;
}

// On a separate thread, which is abandoned if NCCL waits for more than this rank's kernels.
void Connection::abort() noexcept {
  if (comm_ == nullptr) return;
  try {
    std::promise<void> ended;
    const std::future<void> end = ended.get_future();
    std::thread([library = library_, comm = comm_, ended = std::move(ended)]() mutable {
      (void)library->call.CommAbort(comm);
      ended.set_value();
    }).detach();
    end.wait_for(kAbortTime);
  } catch (const std::exception&) {  // no thread could be had: the process's end does it
  }
  comm_ = nullptr;
}

Operation::Operation(const Connection& connection, LibraryReduction reduction)
    : connection_(connection), op_(reduction.op) {
  if (!reduction.factor) return;
  connection_.check("ncclRedOpCreatePreMulSum", connection_.library().call.RedOpCreatePreMulSum(
                                                    &op_, reduction.factor->data(), reduction.type,
                                                    kScalarHostImmediate, connection_.get()));
  made_ = true;
}

Operation::~Operation() {
  if (made_) (void)connection_.library().call.RedOpDestroy(op_, connection_.get());
}

}  // namespace polyhvd::nccl
