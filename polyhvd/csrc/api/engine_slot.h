// Where a native adapter keeps the C table of the engine that is current, if there
// is one. Thread-safe; header only, as adapters do not link the core.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "api/c_api.h"

namespace polyhvd {

class EngineSlot {
 public:
  // The engine, which stays while the visit lasts. Visits may nest.
  class Visit {
   public:
    explicit Visit(EngineSlot& slot) noexcept : slot_(slot) {
      slot_.visits_.fetch_add(1);
      api_ = slot_.api_.load();
    }
    ~Visit() { slot_.visits_.fetch_sub(1); }
    Visit(const Visit&) = delete;
    Visit& operator=(const Visit&) = delete;

    // Null when there is none.
    const polyhvd_engine_api* api() const noexcept { return api_; }

   private:
    EngineSlot& slot_;
    const polyhvd_engine_api* api_;
  };

  // Null: there is no engine. Returns when all visits to the old one are over. False for a table
  // of another version, which the core gives to no adapter that passes its own version. Then no
  // engine is set, as nothing could be submitted. One thread at a time.
  bool set(const polyhvd_engine_api* api) noexcept {
    const bool fits = api == nullptr || (api->version == POLYHVD_C_API_VERSION &&
                                         api->size == sizeof(polyhvd_engine_api));
    if (api_.exchange(fits ? api : nullptr) == nullptr) return fits;
    while (visits_.load() > 0) std::this_thread::yield();
    return fits;
  }
  // In a forked child, to which the threads of the visits did not come.
  void forget() noexcept {
    api_.store(nullptr);
    visits_.store(0);
  }

 private:
  std::atomic<const polyhvd_engine_api*> api_{nullptr};
  std::atomic<int> visits_{0};
};

}  // namespace polyhvd
