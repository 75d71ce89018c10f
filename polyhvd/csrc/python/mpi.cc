#include "python/mpi.h"

#include <pybind11/stl.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "mpi/runtime.h"
#include "python/gil.h"
#include "python/text.h"

namespace py = pybind11;

namespace polyhvd {
namespace {

// For waits without the GIL: lets Ctrl-C end them.
void check_signals() {
  if (python_ends()) return;
  const WithGil with_gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

std::shared_ptr<mpi::Runtime> open_mpi(const py::sequence& places, bool several) {
  const std::vector<std::string> names = paths_of(places);
  const WithoutGil without_gil;
  return std::make_shared<mpi::Runtime>(
      names, several ? mpi::ThreadLevel::kMultiple : mpi::ThreadLevel::kSerialized);
}

std::shared_ptr<mpi::JobCommunicator> meet(mpi::Runtime& runtime,
                                           std::optional<std::intptr_t> communicator,
                                           const std::vector<int>& ranks, double timeout_s) {
  return runtime.meet(communicator, ranks, std::chrono::duration<double>(timeout_s), check_signals);
}

std::vector<py::bytes> gather(mpi::JobCommunicator& job, const std::string& mine) {
  std::vector<std::string> texts;
  {
    const WithoutGil without_gil;
    texts = job.gather(mine, check_signals);
  }
  return {texts.begin(), texts.end()};
}

}  // namespace

void define_mpi(py::module_& m) {
  using Released = py::call_guard<WithoutGil>;
  m.def(
      "probe_mpi",
      [](const py::sequence& names) {
        const auto library = mpi::open_library(paths_of(names), /*stays=*/false);
        return std::make_pair(path_from(library->path()), library->version());
      },
      py::arg("names"));
  py::class_<mpi::Runtime, std::shared_ptr<mpi::Runtime>>(m, "MpiRuntime")
      .def(py::init(&open_mpi), py::arg("names"), py::arg("several_threads"))
      .def(
          "initialize",
          [](mpi::Runtime& self, double timeout_s) {
            return self.initialize(std::chrono::duration<double>(timeout_s), check_signals);
          },
          py::arg("timeout_s"), Released())
      .def("meet", &meet, py::arg("communicator"), py::arg("ranks"), py::arg("timeout_s"),
           Released())
      .def(
          "finish", [](mpi::Runtime& self) { self.finish(check_signals); }, Released())
      .def("give_up", &mpi::Runtime::give_up)
      .def_property_readonly("path",
                             [](mpi::Runtime& self) { return path_from(self.library().path()); })
      .def_property_readonly("version", [](mpi::Runtime& self) { return self.library().version(); })
      .def_property_readonly(
          "family", [](mpi::Runtime& self) { return std::string(self.library().family()); })
      .def_property_readonly("threads_supported", [](const mpi::Runtime& self) {
        return self.threads() == mpi::ThreadLevel::kMultiple;
      });
  py::class_<mpi::JobCommunicator, std::shared_ptr<mpi::JobCommunicator>>(m, "MpiJobCommunicator")
      .def(
          "hosts", [](mpi::JobCommunicator& self) { return self.hosts(check_signals); }, Released())
      .def("gather", &gather, py::arg("mine"))
      .def_property_readonly("rank", &mpi::JobCommunicator::rank)
      .def_property_readonly("size", &mpi::JobCommunicator::size);
}

}  // namespace polyhvd
