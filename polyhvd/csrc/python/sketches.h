// Sketches of tensors (host/sketch.h), as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

namespace polyhvd {

void define_sketches(pybind11::module_& m);

}  // namespace polyhvd
