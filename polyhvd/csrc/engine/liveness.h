// How the ranks of a job know of each other's end, beside the control channels.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "control/error.h"

namespace polyhvd {

// As seen from outside.
struct ProcessState {
  bool may_answer = true;  // false: it is stopped, or gone
  std::string text;
};

class Liveness {
 public:
  virtual ~Liveness() = default;
  // Why the job ended, if another rank of this host has reported that, or has died. Cheap.
  virtual std::optional<Error> abort_reason() const = 0;
  // Notifies the ranks of this host that the job has ended, and wakes them.
  virtual void spread_abort(const Error& error) noexcept = 0;
  // Marks this rank as departed in good order, before its connections close.
  virtual void leave() noexcept = 0;
  // Called now and then: lets a library that sends only while it is asked to, such as MPI, go on
  // with what others wait for. `pending`: so does a caller of this rank. Role's holder only.
  virtual void move_along(bool pending) = 0;
  // Reports to the ranks of this host that this one has executed `count` removals of process sets.
  virtual void tell_removals(std::uint64_t count) noexcept = 0;
  // Closes every connection and unmaps shared memory; no communicator or channel
  // is left by then. Counters stay readable.
  virtual void close() noexcept = 0;
  // Every descriptor that connects this rank to others, for a forked child to close.
  virtual std::vector<int> descriptors() const = 0;
  // Which process a rank is, for messages: "pid 812 on algo-2".
  virtual std::string name_of(int rank) const = 0;
  // The state of another rank's process, if this rank is the one to look: it leads
  // its domain and shares a host with the other.
  virtual std::optional<ProcessState> look_at(int rank) const = 0;
  // The same, of any rank of this host, whoever leads it.
  virtual std::optional<ProcessState> look_beside(int rank) const = 0;
  // Ranks of this host whose process is known to have died: its threads have ended, though its
  // memory may still be on its way back. Also after close(), as of then. Any thread.
  virtual std::vector<int> dead_here() const = 0;
  // Statistics of the data path. Any thread.
  virtual void add_counters(std::map<std::string, std::uint64_t>& counters) const = 0;
};

}  // namespace polyhvd
