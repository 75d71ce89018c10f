// What Linux says of another process of this machine.
#pragma once

#include <optional>

#include "engine/liveness.h"

namespace polyhvd {

// Nothing where /proc does not tell.
std::optional<ProcessState> process_state(int pid);

}  // namespace polyhvd
