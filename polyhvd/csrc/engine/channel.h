// One control connection: whole frames to and from one peer, never blocking.
#pragma once

#include <chrono>
#include <string>
#include <string_view>

#include "control/error.h"

namespace polyhvd {

class Channel {
 public:
  virtual ~Channel() = default;

  // Queues a payload (wire.h). What does not fit now is sent by later flushes.
  virtual void post(std::string_view payload) = 0;

  // Moves queued bytes; true when none is left. A broken connection is reported
  // by poll(), after what was received on it.
  virtual bool flush() = 0;

  // Takes the next whole payload, checksum verified; false when there is none.
  // Throws Failure(kPeerLost) on a closed or garbled connection.
  virtual bool poll(std::string& payload) = 0;

  // Makes sure that the peer looks at what was posted, even if it has nothing
  // pending itself. Called before this rank goes to sleep over an answer.
  virtual void nudge() noexcept {}

  // Called once a second or so. If bytes may be lost on the way, sends a heartbeat when
  // nothing was sent for a while, so that a loss is noticed.
  virtual void beat(std::chrono::steady_clock::time_point now) { (void)now; }

  // World rank at the other end.
  virtual int peer() const noexcept = 0;
};

}  // namespace polyhvd
