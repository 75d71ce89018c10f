#include "python/settings.h"

#include <pybind11/stl.h>

#include <chrono>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "python/text.h"

namespace py = pybind11;

namespace polyhvd {
namespace {

Key read_key(const py::handle& object) {
  const auto text = py::reinterpret_borrow<py::object>(object).cast<std::string>();
  Key key;
  if (text.size() != key.size()) {
    throw py::value_error("a key of a session has " + std::to_string(key.size()) + " bytes");
  }
  std::memcpy(key.data(), text.data(), key.size());
  return key;
}

std::map<int, SessionKeys> read_keys(const py::object& object) {
  std::map<int, SessionKeys> keys;
  for (const auto& [rank, pair] : object.cast<py::dict>()) {
    keys[rank.cast<int>()] = {read_key(pair.attr("send")), read_key(pair.attr("receive"))};
  }
  return keys;
}

}  // namespace

Connections read_connections(const py::object& object, const py::object& settings) {
  Connections connections;
  connections.rank = object.attr("rank").cast<int>();
  connections.size = object.attr("size").cast<int>();
  connections.domains = object.attr("domains").cast<std::vector<std::vector<int>>>();
  connections.labels = object.attr("labels").cast<std::vector<std::string>>();
  connections.pids = object.attr("pids").cast<std::vector<int>>();
  connections.segment_fd = object.attr("segment_fd").cast<int>();
  connections.local_fds = object.attr("local_fds").cast<std::map<int, int>>();
  connections.control_fds = object.attr("control_fds").cast<std::map<int, int>>();
  connections.data_fds = object.attr("data_fds").cast<std::map<int, int>>();
  connections.control_keys = read_keys(object.attr("control_keys"));
  connections.data_keys = read_keys(object.attr("data_keys"));
  connections.watches_deaths = object.attr("watches_deaths").cast<bool>();
  connections.process_sets = object.attr("process_sets").cast<std::vector<std::vector<int>>>();
  connections.backends = settings.attr("backends").cast<std::vector<std::string>>();
  connections.shares_gpus = settings.attr("shares_gpus").cast<bool>();
  connections.hierarchical = settings.attr("hierarchical_allreduce").cast<bool>();
  return connections;
}

EngineOptions read_options(const py::object& settings, const py::object& placement,
                           const std::string& job, const std::shared_ptr<Mailbox>& mailbox,
                           bool recovers) {
  using Seconds = std::chrono::duration<double>;
  const auto number = [&](const char* name) { return settings.attr(name).cast<double>(); };
  EngineOptions options;
  options.coordinator.cache_capacity = settings.attr("cache_capacity").cast<std::size_t>();
  options.coordinator.fusion.bytes_max = settings.attr("fusion_bytes_max").cast<std::size_t>();
  options.coordinator.fusion.groups_apart = settings.attr("groups_apart").cast<bool>();
  options.core =
      settings.attr("engine_core")(placement.attr("local_rank"), placement.attr("local_size"))
          .cast<int>();
  options.cycle_time = Seconds(number("cycle_time_ms") / 1e3);
  options.steps_per_sample =
      settings.attr("steps_per_sample")(placement.attr("rank"), placement.attr("size")).cast<int>();
  options.data_checksums = settings.attr("data_checksums").cast<bool>();
  options.reproducible = settings.attr("reproducible").cast<bool>();
  options.attaching = settings.attr("attaching").cast<int>();
  options.data_timeout = Seconds(number("data_timeout_s"));
  options.stalls.warn =
      Seconds(settings.attr("stall_check_disable").cast<bool>() ? 0.0 : number("stall_warn_s"));
  options.flights.root = path_of(settings.attr("flight_folder"));
  options.report = settings.attr("report_descriptor").cast<int>();
  options.flights.job = settings.attr("flight_job")(job).cast<std::string>();
  options.stalls.shutdown = Seconds(number("stall_shutdown_s"));
  options.mailbox = mailbox;
  options.log = [mailbox](const std::string& text) { mailbox->log(text); };
  if (recovers) options.loss_log = [mailbox](const std::string& text) { mailbox->log(text, true); };
  return options;
}

}  // namespace polyhvd
