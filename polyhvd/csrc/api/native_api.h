// An engine behind the table of C functions that native adapters submit through (c_api.h).
#pragma once

#include <cstdint>

#include "api/c_api.h"
#include "control/types.h"
#include "engine/engine.h"

namespace polyhvd {

// The table of one engine. It stays where it is, since adapters keep its address.
class NativeApi {
 public:
  // The engine outlives this.
  NativeApi(Engine& engine, std::uint64_t generation) noexcept;
  NativeApi(const NativeApi&) = delete;
  NativeApi& operator=(const NativeApi&) = delete;

  const polyhvd_engine_api& table() const noexcept { return table_; }
  std::uint64_t generation() const noexcept { return table_.generation; }

  // Throws Failure(kPeerLost) for a submission that was made for another generation of the world
  // than this engine's; 0 was made for any, and a null name is of a call without one.
  void require_generation(std::uint64_t made_for, OpKind kind, const char* name) const;

 private:
  static std::int32_t submit(void* self, const polyhvd_submission* submission, char* message,
                             std::size_t message_bytes) noexcept;
  static void lend(void* self) noexcept;

  Engine& engine_;
  const polyhvd_engine_api table_;
};

}  // namespace polyhvd
