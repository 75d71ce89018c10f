// A communicator of NCCL's: made without blocking, asked how it is, and ended in good order or
// at once. The driver's; nothing here waits for other ranks without a way out.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>

#include "control/error.h"
#include "engine/parking.h"
#include "engine/transport.h"
#include "nccl/library.h"
#include "nccl/reductions.h"

namespace polyhvd::nccl {

class Connection {
 public:
  // `label` names it in errors: "rank 0 in process set 1 of ranks 0, 2".
  Connection(std::shared_ptr<const Library> library, std::string label)
      : library_(std::move(library)), label_(std::move(label)) {}
  ~Connection() { abort(); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  // Returns at once; settle() when the ranks are connected. The GPU is the calling thread's
  // current one.
  void begin(const UniqueId& id, int size, int position);
  // Waits until what was begun is done: for calls, that their work was given to the stream.
  // Throws as Parking does, and Failure with NCCL's text.
  void settle(const char* what, Parking& parking, Deadline deadline);
  // Errors since then of work on the stream, which are not reported otherwise.
  std::optional<Error> trouble() const;

  const Library& library() const noexcept { return *library_; }
  Comm get() const noexcept { return comm_; }
  void check(const char* function, Result result) const {
    library_->check(function, result, comm_);
  }

  // Once the stream has done everything. False when other ranks keep it from ending in time.
  bool close(Deadline deadline) noexcept;
  // Ends whatever waits for other ranks, on this GPU. Returns in a bounded time.
  void abort() noexcept;

 private:
  Error error_of(const char* what, Result result) const;
  Result state() const;

  std::shared_ptr<const Library> library_;
  std::string label_;
  Comm comm_ = nullptr;
};

// Calls that NCCL launches as one. Ended in any case: what is left open takes in every later call.
class Group {
 public:
  explicit Group(const Connection& connection) : connection_(connection) {
    connection_.check("ncclGroupStart", connection_.library().call.GroupStart());
  }
  ~Group() {
    if (open_) (void)connection_.library().call.GroupEnd();
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  void end() {
    open_ = false;
    connection_.check("ncclGroupEnd", connection_.library().call.GroupEnd());
  }

 private:
  const Connection& connection_;
  bool open_ = true;
};

// The operation of a reduction; one with a factor is made for a call, and given back.
class Operation {
 public:
  Operation(const Connection& connection, LibraryReduction reduction);
  ~Operation();
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  RedOp get() const noexcept { return op_; }

 private:
  const Connection& connection_;
  RedOp op_;
  bool made_ = false;
};

}  // namespace polyhvd::nccl
