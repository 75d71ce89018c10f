// What has gone wrong with collectives, kept by us: MXNet's engine hands an exception to whoever
// reads first and forgets it, also for operations that still wait. The arrays that were not
// written are kept until what has waited for them is over. Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "control/error.h"

namespace polyhvd::mxnet {

// Read by Python where it lies.
struct Watch {
  std::atomic<std::int64_t> in_flight{0};  // collectives that MXNet's engine has not done with
  std::atomic<std::int64_t> failures{0};   // since the process began
  std::atomic<std::int64_t> pusher{0};     // the thread of the last collective, as pthread_self()
  std::atomic<std::int64_t> unsettled{0};  // arrays of failures whose readers may wait still
  std::atomic<std::int64_t> forgiven{0};   // of the failures, when the last job began
};
static_assert(sizeof(Watch) == 5 * sizeof(std::int64_t));

template <class Array>
class Failures {
 public:
  // Before MXNet is notified. `arrays`: what the collective was to write.
  void note(std::uint64_t generation, int code, const std::string& text,
            std::vector<Array> arrays) {
    std::lock_guard lock(mutex_);
    // The first one keeps what it has, and what depends on it: see settle().
    for (Array& array : arrays) {
      const bool is_first = &array == arrays.data();
      unsettled_.emplace_back(std::move(array), is_first ? std::string() : text);
    }
    if (known_.size() == kKnownMax) known_.pop_front();
    known_.emplace_back(code, text);
    // An operation may come to its end long after its engine: what ended a later one stands.
    if (!ends_engine(static_cast<ErrorCode>(code)) || generation <= ended_.load()) return;
    end_ = known_.back();
    ended_.store(generation);
  }

  // The arrays that were not written, whose readers may wait still, each with the error
  // that it is to have, if it is to have another one. They are the caller's now.
  std::vector<std::pair<Array, std::string>> take_unsettled() {
    std::lock_guard lock(mutex_);
    return std::exchange(unsettled_, {});
  }

  // The code of the failure whose text a message of MXNet has in it, and that text; 0: of none.
  std::pair<int, std::string> find(const std::string& message) const {
    std::lock_guard lock(mutex_);
    for (auto known = known_.rbegin(); known != known_.rend(); ++known) {
      if (message.find(known->second) != message.npos) return *known;
    }
    return {0, {}};
  }

  // The last failure, while what has waited for it may not be over: perhaps why another was
  // skipped. Code 0: there is none.
  std::pair<int, std::string> recent() const {
    std::lock_guard lock(mutex_);
    if (unsettled_.empty() || known_.empty()) return {0, {}};
    return known_.back();
  }

  // The last failure of all; code 0: there is none.
  std::pair<int, std::string> last() const {
    std::lock_guard lock(mutex_);
    return known_.empty() ? std::pair<int, std::string>() : known_.back();
  }

  // Whether nothing can succeed any more with the engine of this generation.
  bool has_ended(std::uint64_t generation) const noexcept { return ended_.load() == generation; }

  // Of the engine that has ended last: what went wrong.
  std::pair<int, std::string> end() const {
    std::lock_guard lock(mutex_);
    return end_;
  }

 private:
  static constexpr std::size_t kKnownMax = 4096;

  mutable std::mutex mutex_;
  std::vector<std::pair<Array, std::string>> unsettled_;  // guarded by mutex_
  std::deque<std::pair<int, std::string>> known_;         // guarded by mutex_; the last ones
  std::pair<int, std::string> end_;                       // guarded by mutex_
  std::atomic<std::uint64_t> ended_{0};                   // generation of an engine; none has 0
};

}  // namespace polyhvd::mxnet
