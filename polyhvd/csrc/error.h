// What can go wrong, as a value. Threads hand errors over in handles; an
// exception (Failure) never leaves the thread that threw it.
// Mirrors the tree in polyhvd/errors.py.
#pragma once

#include <cstdint>
#include <exception>
#include <string>
#include <utility>

namespace polyhvd {

enum class ErrorCode : std::uint8_t {
  kInvalidArgument = 1,  // a bad call; raised at submit, the job goes on
  kRankMismatch = 2,     // ranks disagree; on every rank, the job goes on
  kPeerLost = 3,         // a rank died or was cut off; the engine is done
  kPeerDeparted = 4,     // a rank that is needed has left in good order
  kShutdown = 5,         // this engine was shut down while work was pending
  kInterrupted = 6,      // Ctrl-C in the middle of a transfer
  kTimeout = 7,          // an agreed transfer did not finish in time
  kInternal = 8,         // a bug of ours
};

// The class of polyhvd/errors.py by which Python hears of it, in whatever framework.
constexpr const char* class_name(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return "InvalidArgumentError";
    case ErrorCode::kRankMismatch:
      return "RankMismatchError";
    case ErrorCode::kPeerLost:
      return "PeerLostError";
    case ErrorCode::kPeerDeparted:
      return "PeerDepartedError";
    case ErrorCode::kShutdown:
      return "ShutdownError";
    case ErrorCode::kTimeout:
      return "TransferTimeoutError";
    case ErrorCode::kInterrupted:
    case ErrorCode::kInternal:
      break;
  }
  return "HorovodInternalError";
}

struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
};

// The exception form of an Error, for use within one thread.
class Failure : public std::exception {
 public:
  explicit Failure(Error error) : error_(std::move(error)) {}
  Failure(ErrorCode code, std::string message) : error_{code, std::move(message)} {}
  const char* what() const noexcept override { return error_.message.c_str(); }
  const Error& error() const noexcept { return error_; }

 private:
  Error error_;
};

}  // namespace polyhvd
