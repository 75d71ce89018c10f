#include "python/caller.h"

#include <pybind11/pybind11.h>

#include "python/text.h"

namespace polyhvd {

namespace py = pybind11;

std::string caller_line() {
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame && !frame.is_none()) {
    const py::dict globals = frame.attr("f_globals");
    const auto module =
        globals.contains("__name__") ? printable(globals["__name__"]) : std::string();
    if (module != "polyhvd" && module.rfind("polyhvd.", 0) != 0) {
      const std::string path = printable(frame.attr("f_code").attr("co_filename"));
      return path.substr(path.rfind('/') + 1) + ":" +
             std::to_string(frame.attr("f_lineno").cast<int>());
    }
    frame = frame.attr("f_back");
  }
  return "";
}

}  // namespace polyhvd
