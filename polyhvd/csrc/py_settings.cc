#include "py_settings.h"

#include <pybind11/stl.h>

#include <chrono>
#include <map>
#include <string>
#include <vector>

#include "mpi/runtime.h"
#include "py_text.h"

namespace py = pybind11;

namespace polyhvd {

Wiring read_wiring(const py::object& object) {
  Wiring wiring;
  wiring.rank = object.attr("rank").cast<int>();
  wiring.size = object.attr("size").cast<int>();
  wiring.domains = object.attr("domains").cast<std::vector<std::vector<int>>>();
  wiring.labels = object.attr("labels").cast<std::vector<std::string>>();
  wiring.pids = object.attr("pids").cast<std::vector<int>>();
  wiring.segment_fd = object.attr("segment_fd").cast<int>();
  wiring.local_fds = object.attr("local_fds").cast<std::map<int, int>>();
  wiring.control_fds = object.attr("control_fds").cast<std::map<int, int>>();
  wiring.data_fds = object.attr("data_fds").cast<std::map<int, int>>();
  wiring.process_sets = object.attr("process_sets").cast<std::vector<std::vector<int>>>();
  wiring.backends = object.attr("backends").cast<std::vector<std::string>>();
  wiring.nccl_libraries = paths_of(object.attr("nccl_libraries"));
  wiring.shares_gpus = object.attr("shares_gpus").cast<bool>();
  wiring.hierarchical = object.attr("hierarchical").cast<bool>();
  wiring.mpi = object.attr("mpi").cast<std::shared_ptr<mpi::Session>>();
  return wiring;
}

EngineOptions read_options(const py::object& config, const std::shared_ptr<Mailbox>& mailbox) {
  using Seconds = std::chrono::duration<double>;
  const auto number = [&](const char* name) { return config.attr(name).cast<double>(); };
  EngineOptions options;
  options.coordinator.cache_capacity = config.attr("cache_capacity").cast<std::size_t>();
  options.coordinator.fusion.bytes_max = config.attr("fusion_bytes_max").cast<std::size_t>();
  options.coordinator.fusion.groups_apart = config.attr("groups_apart").cast<bool>();
  options.core = config.attr("engine_core").cast<int>();
  options.cycle_time = Seconds(number("cycle_time_ms") / 1e3);
  options.steps_per_sample = config.attr("steps_per_sample").cast<int>();
  options.data_checksums = config.attr("data_checksums").cast<bool>();
  options.reproducible = config.attr("reproducible").cast<bool>();
  options.attaching = config.attr("attaching").cast<int>();
  options.data_timeout = Seconds(number("data_timeout_s"));
  options.stalls.warn =
      Seconds(config.attr("stall_check_disable").cast<bool>() ? 0.0 : number("stall_warn_s"));
  options.flights.root = path_of(config.attr("flight_folder"));
  options.flights.job = config.attr("flight_job").cast<std::string>();
  options.stalls.shutdown = Seconds(number("stall_shutdown_s"));
  options.mailbox = mailbox;
  options.log = [mailbox](const std::string& text) { mailbox->log(text); };
  return options;
}

}  // namespace polyhvd
