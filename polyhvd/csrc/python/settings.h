// Reads a job and its ranks from Python's objects.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "engine/engine.h"
#include "observe/mailbox.h"
#include "world.h"

namespace polyhvd {

// Of polyhvd.runtime.connections.Connections, and of the settings that choose what moves data.
Connections read_connections(const pybind11::object& object, const pybind11::object& settings);

// Of polyhvd.config.Settings and polyhvd.runtime.placement.Placement; `job` names it on this host;
// `recovers`: it continues without ranks that are lost.
EngineOptions read_options(const pybind11::object& settings, const pybind11::object& placement,
                           const std::string& job, const std::shared_ptr<Mailbox>& mailbox,
                           bool recovers);

}  // namespace polyhvd
