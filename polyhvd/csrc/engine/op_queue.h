// The operations of this rank: what was submitted and is not done, by name.
// Thread-safe; framework threads put in, the driver takes out.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "control/operation.h"
#include "control/process_set.h"
#include "control/request.h"
#include "control/response_cache.h"
#include "engine/memory_in_flight.h"
#include "observe/lock_order.h"
#include "observe/recorder.h"
#include "observe/wait_meter.h"

namespace polyhvd {

class OpQueue {
 public:
  OpQueue(ProcessSets& sets, int rank) : rank_(rank), sets_(sets) {}

  // Checks the submission and queues it. `where` names the caller's line; it is
  // called, without a lock, only when the operation is new to the cache. Throws
  // Failure: kInvalidArgument, or why the queue is closed.
  OperationPtr submit(Submission&& submission, const std::function<std::string()>& where);

  // Throws as submit() does for a bad call, and queues nothing.
  void require_valid(const Submission& submission) const;

  // The turn of a call without a name that is submitted later. Throws as submit() does for a
  // rank that is not a member, or has joined; submit() reports that the queue is closed.
  Turn take_turn(ProcessSetId set, OpKind kind);

  // Whether something waits to be announced. Any thread, no lock.
  bool has_news() const noexcept { return news_.load() > 0; }
  // How many operations were ever submitted; shows whether work keeps arriving.
  std::uint64_t submitted() const noexcept { return submitted_.load(std::memory_order_relaxed); }

  // Driver: moves everything new into a report.
  void announce(Report& report);
  // Driver: announces an operation again in full, when it was announced as `id`, and `turn`
  // if it has no name.
  void announce_in_full(CacheId id, Turn turn, Report& report);

  // Driver: the operation that all agreed to run; it stays in flight until retire().
  OperationPtr find(ProcessSetId set, std::string_view name);
  // Driver: a call without a name that this rank did not make, as it has joined: its own
  // calls go on after it.
  void pass_over(const TurnKey& key);
  // Driver: forgets a finished operation; the next of that name, if one waits, is new.
  void retire(const OperationPtr& operation);

  // Driver: applies to the cache, which submit() reads.
  template <class Change>
  void change_cache(Change&& change) {
    std::lock_guard lock(mutex_);
    change(cache_);
    ++cache_version_;
  }
  // Driver only: the driver is the cache's one writer.
  const ResponseCache& cache() const noexcept { return cache_; }

  // Driver: changes the process sets, which submit() reads.
  ProcessSetId add_process_set(std::vector<int> ranks);
  void remove_process_set(ProcessSetId id);
  // Members of every process set, by its number. Any thread.
  std::map<ProcessSetId, std::vector<int>> process_sets() const;
  // Driver: has executed the next removal; see ProcessSets.
  std::uint64_t settle_removal();
  // Driver: whether this rank has joined, and others continue without it.
  bool has_joined() const;
  // Driver: records an operation that was not submitted here, see stand_in.h.
  void record(Operation& operation);

  // Every later submit fails with `error`. Returns what was pending.
  std::vector<OperationPtr> close(Error error);

  // close() is about to be called with this error: closed_by() has it from now on.
  void expect_close(const Error& error);
  // Why every later submit fails; close() or expect_close() has been called.
  Error closed_by() const;

  // Whether operations are pending that were announced to other ranks.
  bool has_announced() const;
  // What became of the operations. Reading: any thread, no lock.
  Recorder& recorder() noexcept { return recorder_; }
  const Recorder& recorder() const noexcept { return recorder_; }
  // How long this rank has waited for others. Reading: any thread, no lock.
  WaitMeter& waits() noexcept { return waits_; }
  const WaitMeter& waits() const noexcept { return waits_; }

  // "allreduce 'x'" of each operation in flight that a rank may wait for, in alphabetical order.
  std::vector<std::string> in_flight() const;
  // Operations in flight. Any thread, no lock.
  int pending() const noexcept { return pending_.load(std::memory_order_relaxed); }
  std::uint64_t cache_hits() const noexcept { return cache_hits_.load(std::memory_order_relaxed); }

 private:
  struct Key {
    ProcessSetId set;
    std::string_view name;  // of the operation itself
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct Hash {
    std::size_t operator()(const Key& k) const noexcept {
      return std::hash<std::string_view>{}(k.name) ^ (k.set * 0x9e3779b97f4a7c15u);
    }
  };

  void check(const Submission& submission) const;
  void check_membership(const Submission& submission) const;
  void number(Submission& submission);
  void check_splits(const Submission& submission) const;
  void check_new_set(const Submission& submission) const;
  void check_removal(const Submission& submission) const;
  void claim_memory(const Operation& operation);
  void release_memory(const Operation& operation);
  Request request_of(const Operation& operation) const;

  const int rank_;
  Recorder recorder_;  // of its writers, on_submit() holds mutex_
  WaitMeter waits_;

  mutable OrderedMutex<LockRank::queue> mutex_;
  // All guarded by mutex_. The driver is the one writer of sets_ and cache_, and
  // reads them without it.
  ProcessSets& sets_;
  bool joined_ = false;
  ResponseCache cache_;
  std::uint64_t cache_version_ = 0;
  std::unordered_map<Key, OperationPtr, Hash> in_flight_;
  std::map<std::pair<ProcessSetId, std::string>, std::deque<OperationPtr>> waiting_;
  std::vector<OperationPtr> unannounced_;
  std::map<std::pair<ProcessSetId, OpKind>, Turn> turns_;  // the last that was counted
  MemoryInFlight memory_;
  std::optional<Error> closed_, expected_;

  std::atomic<int> news_{0};                 // size of unannounced_, for has_news
  std::atomic<int> pending_{0};              // size of in_flight_
  std::atomic<std::uint64_t> submitted_{0};  // statistics
  std::atomic<std::uint64_t> cache_hits_{0};
};

}  // namespace polyhvd
