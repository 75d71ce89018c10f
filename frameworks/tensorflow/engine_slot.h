// The one way from this library to the core: the C table of the engine that is
// current, or nothing. Thread-safe.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <shared_mutex>

#include "c_api.h"

namespace polyhvd::tf {

class EngineSlot {
 public:
  // Returned by submit() when there is no engine; no value of error.h.
  static constexpr std::int32_t kNoEngine = -1;

  // Null: there is no engine. Returns after every submit() to the old one has
  // left it. False, and nothing changes, for a table of another version.
  bool set(const polyhvd_engine_api* api);
  // In a forked child, where a lock may be held by a thread that does not exist.
  void forget() noexcept { api_.store(nullptr); }

  // As polyhvd_engine_api::submit, or kNoEngine.
  std::int32_t submit(const polyhvd_submission& submission, char* message,
                      std::size_t message_bytes);

 private:
  std::shared_mutex mutex_;
  std::atomic<const polyhvd_engine_api*> api_{nullptr};
};

}  // namespace polyhvd::tf
