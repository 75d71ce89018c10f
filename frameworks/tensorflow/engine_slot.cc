#include "engine_slot.h"

#include <mutex>

namespace polyhvd::tf {

bool EngineSlot::set(const polyhvd_engine_api* api) {
  if (api != nullptr &&
      (api->version != POLYHVD_C_API_VERSION || api->size < sizeof(polyhvd_engine_api))) {
    return false;
  }
  std::lock_guard lock(mutex_);
  api_.store(api);
  return true;
}

std::int32_t EngineSlot::submit(const polyhvd_submission& submission, char* message,
                                std::size_t message_bytes) {
  std::shared_lock lock(mutex_);
  const polyhvd_engine_api* api = api_.load();
  if (api == nullptr) return kNoEngine;
  return api->submit(api->engine, &submission, message, message_bytes);
}

}  // namespace polyhvd::tf
