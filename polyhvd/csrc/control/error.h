// What can go wrong, as a value. Threads hand errors over in handles; an
// exception (Failure) never leaves the thread that threw it.
// Mirrors the tree in polyhvd/errors.py.
#pragma once

#include <cstdint>
#include <exception>
#include <iterator>
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

// The facts about a code for the other languages and the frameworks. Everything that distinguishes
// codes is made of this table or checked against it: polyhvd/errors.py, the adapters' classes, and
// the launcher's choice of the rank to blame.
struct ErrorKind {
  ErrorCode code;
  const char* class_name;  // in polyhvd/errors.py; several codes may share one
  bool ends_engine;        // nothing can succeed any more with the engine that reports it
  bool is_consequence;     // of what happened on another rank, or elsewhere on this one
};
inline constexpr ErrorKind kErrorKinds[] = {
    {ErrorCode::kInvalidArgument, "InvalidArgumentError", false, false},
    {ErrorCode::kRankMismatch, "RankMismatchError", false, false},
    {ErrorCode::kPeerLost, "PeerLostError", true, true},
    {ErrorCode::kPeerDeparted, "PeerDepartedError", false, true},
    {ErrorCode::kShutdown, "ShutdownError", false, true},
    {ErrorCode::kInterrupted, "HorovodInternalError", true, true},
    {ErrorCode::kTimeout, "TransferTimeoutError", true, true},
    {ErrorCode::kInternal, "HorovodInternalError", false, true},
};

// What is known of a code; of one that is not in the table, what holds for a bug of ours.
constexpr const ErrorKind& kind_of(ErrorCode code) noexcept {
  for (const ErrorKind& kind : kErrorKinds) {
    if (kind.code == code) return kind;
  }
  return kErrorKinds[std::size(kErrorKinds) - 1];
}
static_assert(kErrorKinds[std::size(kErrorKinds) - 1].code == ErrorCode::kInternal);
constexpr const char* class_name(ErrorCode code) noexcept { return kind_of(code).class_name; }
constexpr bool ends_engine(ErrorCode code) noexcept { return kind_of(code).ends_engine; }

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
