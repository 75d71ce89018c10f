// MPI in this process, as Python sees it: what init() and the end of the process call.
#pragma once

#include <pybind11/pybind11.h>

namespace polyhvd {

void define_mpi(pybind11::module_& m);

}  // namespace polyhvd
