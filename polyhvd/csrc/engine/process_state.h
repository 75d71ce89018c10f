// The state of another process of this machine, from Linux.
#pragma once

#include <optional>

#include "engine/liveness.h"

namespace polyhvd {

// Nothing if /proc does not have it.
std::optional<ProcessState> process_state(int pid);

}  // namespace polyhvd
