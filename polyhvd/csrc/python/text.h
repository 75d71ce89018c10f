// Text and paths between Python and the core, which has bytes. A path need not be UTF-8: Python's
// strings have surrogates for such bytes.
#pragma once

#include <pybind11/pybind11.h>

#include <string>
#include <string_view>
#include <vector>

namespace polyhvd {

// As UTF-8. What is none, such as a file name in another encoding, stands escaped in it.
std::string printable(const pybind11::handle& text);

// A text of the core's, which may hold such names.
pybind11::str readable(std::string_view text);

// Of a str, bytes or os.PathLike: as the system has it.
std::string path_of(const pybind11::handle& path);
std::vector<std::string> paths_of(const pybind11::handle& paths);

// A path of the core's, as Python has it.
pybind11::str path_from(std::string_view path);

}  // namespace polyhvd
