// What Python's objects say about a job and its ranks.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "engine.h"
#include "mailbox.h"
#include "world.h"

namespace polyhvd {

// Of polyhvd.wiring.Wiring.
Wiring read_wiring(const pybind11::object& object);

// Of polyhvd.config.Config.
EngineOptions read_options(const pybind11::object& config, const std::shared_ptr<Mailbox>& mailbox);

}  // namespace polyhvd
