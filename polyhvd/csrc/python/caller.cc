#include "python/caller.h"

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <string_view>

#include "python/text.h"

namespace polyhvd {

namespace py = pybind11;

namespace {

// Packages whose code calls polyhvd on behalf of the program: backward() of PyTorch, fit() of
// Keras.
constexpr std::array<std::string_view, 8> kFrameworks{
    "jax", "keras", "lightning", "mxnet", "pytorch_lightning", "tensorflow", "tf_keras", "torch"};

std::string place_of(const py::object& frame) {
  const std::string path = printable(frame.attr("f_code").attr("co_filename"));
  return path.substr(path.rfind('/') + 1) + ":" +
         std::to_string(frame.attr("f_lineno").cast<int>());
}

}  // namespace

std::string caller_line() {
  auto frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  std::string of_framework;
  for (; frame && !frame.is_none(); frame = frame.attr("f_back")) {
    const py::dict globals = frame.attr("f_globals");
    const auto module =
        globals.contains("__name__") ? printable(globals["__name__"]) : std::string();
    const std::string_view package = std::string_view(module).substr(0, module.find('.'));
    if (package == "polyhvd") continue;
    if (std::find(kFrameworks.begin(), kFrameworks.end(), package) == kFrameworks.end()) {
      return place_of(frame);
    }
    if (of_framework.empty()) of_framework = place_of(frame);
  }
  return of_framework;
}

}  // namespace polyhvd
