#include "python/text.h"

#include "control/disagreement.h"

namespace polyhvd {

namespace py = pybind11;

namespace {

template <class Object>
Object checked(PyObject* made) {
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<Object>(made);
}

Py_ssize_t length_of(std::string_view text) { return static_cast<Py_ssize_t>(text.size()); }

}  // namespace

std::string printable(const py::handle& text) {
  return checked<py::bytes>(
      PyUnicode_AsEncodedString(py::str(text).ptr(), "utf-8", "backslashreplace"));
}

py::str readable(std::string_view message) {
  const std::string text = without_controls(message);
  return checked<py::str>(PyUnicode_DecodeUTF8(text.data(), length_of(text), "backslashreplace"));
}

std::string path_of(const py::handle& path) {
  PyObject* bytes = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &bytes) == 0) throw py::error_already_set();
  return py::reinterpret_steal<py::bytes>(bytes);
}

std::vector<std::string> paths_of(const py::handle& paths) {
  std::vector<std::string> found;
  for (const py::handle path : paths) found.push_back(path_of(path));
  return found;
}

py::str path_from(std::string_view path) {
  return checked<py::str>(PyUnicode_DecodeFSDefaultAndSize(path.data(), length_of(path)));
}

}  // namespace polyhvd
