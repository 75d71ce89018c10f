// Copies of many tensors at once (host/copies.h), and comparisons, as Python sees them.
#pragma once

#include <pybind11/pybind11.h>

namespace polyhvd {

void define_copies(pybind11::module_& m);

}  // namespace polyhvd
