// The pure units of the control plane for Python: what tests drive with calls that
// Hypothesis makes up. Messages are the bytes that the product sends.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "control/coordinator.h"
#include "control/mac.h"
#include "control/process_set.h"
#include "control/relay.h"
#include "control/response_cache.h"
#include "control/signed_framing.h"
#include "control/wire.h"

namespace py = pybind11;
using namespace polyhvd;

namespace {

using Ranks = std::vector<int>;
using Entries = std::vector<std::pair<CacheId, Turn>>;  // the turn is 0 where there is a name
using Resends = std::vector<std::tuple<std::int32_t, CacheId, Turn>>;

Time time_of(double seconds) {
  return Time{} +
         std::chrono::duration_cast<Time::duration>(std::chrono::duration<double>(seconds));
}

py::bytes encode_report(const Entries& subtree_hits, const std::vector<Request>& requests,
                        const Ranks& departures, const Resends& answers) {
  Report report;
  for (const auto& [id, turn] : subtree_hits) {
    if (turn == 0) {
      report.subtree_hits.push_back(id);
    } else {
      report.subtree_turns.push_back({0, id, turn});
    }
  }
  report.requests = requests;
  for (const int rank : departures) report.departures.push_back({rank});
  for (const auto& [rank, id, turn] : answers) report.answers.push_back({rank, id, turn});
  std::string payload;
  encode(report, payload);
  return payload;
}

std::optional<py::bytes> take_decision(Coordinator& coordinator) {
  if (!coordinator.has_decision()) return std::nullopt;
  std::string payload;
  encode(coordinator.take_decision(), payload);
  return payload;
}

std::optional<py::bytes> take_report(Relay& relay, double now, double patience) {
  const std::chrono::duration<double> wait(patience);
  const Report report = relay.take_report(time_of(now), wait, wait);
  if (report.empty()) return std::nullopt;
  std::string payload;
  encode(report, payload);
  return payload;
}

std::vector<std::pair<ProcessSetId, std::string>> stalled(const Coordinator& coordinator,
                                                          double now) {
  std::vector<std::pair<ProcessSetId, std::string>> keys;
  for (const Stalled& each : coordinator.stalled(time_of(now), std::chrono::duration<double>(0))) {
    keys.emplace_back(each.process_set, each.name);
  }
  return keys;
}

Key key_of(const std::string& bytes) {
  Key key{};
  std::memcpy(key.data(), bytes.data(), std::min(bytes.size(), key.size()));
  return key;
}

py::bytes tag_of(const std::string& key, const std::string& head, const std::string& body) {
  const Tag tag =
      Mac(key_of(key)).of(std::as_bytes(std::span(head)), std::as_bytes(std::span(body)));
  return {reinterpret_cast<const char*>(tag.data()), tag.size()};
}

py::bytes sign(const std::string& key, const std::vector<std::string>& payloads) {
  SignedFrameWriter writer(key_of(key));
  std::string stream;
  for (const std::string& payload : payloads) writer.append(stream, payload);
  return stream;
}

// The payloads, and whether something was refused behind them.
std::pair<std::vector<py::bytes>, bool> check_signed(const std::string& key,
                                                     const std::string& stream) {
  SignedFrameReader reader(key_of(key));
  reader.append(reinterpret_cast<const std::byte*>(stream.data()), stream.size());
  std::vector<py::bytes> payloads;
  std::string payload;
  try {
    while (reader.next(payload)) payloads.emplace_back(payload);
  } catch (const Failure&) {
    return {std::move(payloads), true};
  }
  return {std::move(payloads), false};
}

void bind_messages(py::module_& module) {
  module.def("tag_of", &tag_of);
  module.def("sign", &sign);
  module.def("check_signed", &check_signed);
  py::enum_<OpKind>(module, "OpKind")
      .value("ALLREDUCE", OpKind::kAllreduce)
      .value("ALLGATHER", OpKind::kAllgather)
      .value("BROADCAST", OpKind::kBroadcast)
      .value("BARRIER", OpKind::kBarrier)
      .value("ALLTOALL", OpKind::kAlltoall)
      .value("REDUCESCATTER", OpKind::kReducescatter)
      .value("JOIN", OpKind::kJoin)
      .value("ADD_PROCESS_SET", OpKind::kAddProcessSet)
      .value("REMOVE_PROCESS_SET", OpKind::kRemoveProcessSet);
  py::enum_<ReduceOp>(module, "ReduceOp")
      .value("SUM", ReduceOp::kSum)
      .value("MAX", ReduceOp::kMax)
      .value("PRODUCT", ReduceOp::kProduct);
  py::enum_<DType>(module, "DType").value("INT32", DType::kInt32).value("FLOAT32", DType::kFloat32);
  py::enum_<ErrorCode>(module, "ErrorCode")
      .value("INVALID_ARGUMENT", ErrorCode::kInvalidArgument)
      .value("RANK_MISMATCH", ErrorCode::kRankMismatch)
      .value("PEER_DEPARTED", ErrorCode::kPeerDeparted);
  py::class_<Request>(module, "Request")
      .def(py::init<>())
      .def_readwrite("rank", &Request::rank)
      .def_readwrite("process_set", &Request::process_set)
      .def_readwrite("kind", &Request::kind)
      .def_readwrite("op", &Request::op)
      .def_readwrite("dtype", &Request::dtype)
      .def_readwrite("root", &Request::root)
      .def_readwrite("priority", &Request::priority)
      .def_property(
          "prescale", [](const Request& request) { return request.scale.pre; },
          [](Request& request, double factor) { request.scale.pre = factor; })
      .def_readwrite("shapes", &Request::shapes)
      .def_readwrite("name", &Request::name)
      .def_readwrite("where", &Request::where)
      .def_readwrite("turn", &Request::turn);
  py::class_<Agreement>(module, "Agreement")
      .def_readonly("process_set", &Agreement::process_set)
      .def_readonly("kind", &Agreement::kind)
      .def_readonly("op", &Agreement::op)
      .def_readonly("dtype", &Agreement::dtype)
      .def_readonly("root", &Agreement::root)
      .def_property_readonly("prescale", [](const Agreement& a) { return a.scale.pre; })
      .def_readonly("shapes", &Agreement::shapes)
      .def_readonly("rows", &Agreement::rows)
      .def_readonly("name", &Agreement::name);
  py::class_<Definition>(module, "Definition");
  py::class_<Decision>(module, "Decision")
      .def_readonly("definitions", &Decision::definitions)
      .def_property_readonly("resends",
                             [](const Decision& decision) {
                               Resends all;
                               for (const Resend& r : decision.resends) {
                                 all.emplace_back(r.rank, r.id, r.turn);
                               }
                               return all;
                             })
      .def_property_readonly(
          "refusals",
          [](const Decision& decision) {
            std::vector<std::tuple<ProcessSetId, std::string, ErrorCode, std::string, OpKind, Turn>>
                all;
            for (const Refusal& r : decision.refusals) {
              all.emplace_back(r.process_set, r.name, r.error.code, r.error.message, r.kind,
                               r.turn);
            }
            return all;
          })
      .def_property_readonly("batches",
                             [](const Decision& decision) {
                               std::vector<Entries> all;
                               for (const Batch& batch : decision.batches) {
                                 Entries& entries = all.emplace_back();
                                 for (std::size_t i = 0; i < batch.ids.size(); ++i) {
                                   entries.emplace_back(batch.ids[i], batch.turn(i));
                                 }
                               }
                               return all;
                             })
      .def_readonly("evictions", &Decision::evictions);
  module.def("encode_report", &encode_report, py::arg("subtree_hits"), py::arg("requests"),
             py::arg("departures"), py::arg("answers"));
  module.def("decode_decision", [](const std::string& bytes) { return decode_decision(bytes); });
  module.def("name_of_turn", [](OpKind kind, Turn turn) { return TurnName(kind, turn).text(); });
  module.def("departures_of", [](const std::string& bytes) {
    Ranks ranks;
    for (const Departure& each : decode_report(bytes).departures) {
      ranks.push_back(each.rank);
    }
    return ranks;
  });
}

}  // namespace

PYBIND11_MODULE(polyhvd_units, module) {
  // Local: polyhvd._core has a translation of its own, in the same process.
  py::register_local_exception<Failure>(module, "Failure");
  bind_messages(module);
  py::class_<ProcessSets>(module, "ProcessSets")
      .def(py::init<int>())
      .def("add", &ProcessSets::add)
      .def("remove", &ProcessSets::remove)
      .def("position", &ProcessSets::position)
      .def("ids", &ProcessSets::ids)
      .def("members", [](const ProcessSets& sets, ProcessSetId id) {
        const auto members = sets.members(id);
        return Ranks(members.begin(), members.end());
      });
  py::class_<Subtree>(module, "Subtree")
      .def(py::init<const ProcessSets&, Ranks>(), py::keep_alive<1, 2>());
  py::class_<ResponseCache>(module, "ResponseCache")
      .def(py::init<>())
      .def("define", &ResponseCache::define)
      .def("evict", &ResponseCache::evict)
      .def("find", &ResponseCache::find<Request>)
      .def("get", &ResponseCache::get, py::return_value_policy::copy)
      .def("__len__", &ResponseCache::size);
  py::class_<Coordinator>(module, "Coordinator")
      .def(py::init([](const ProcessSets& sets, std::size_t capacity, std::size_t fusion_bytes) {
             return std::make_unique<Coordinator>(
                 sets, CoordinatorOptions{capacity, FusionPolicy{fusion_bytes}});
           }),
           py::keep_alive<1, 2>(), py::arg("sets"), py::arg("cache_capacity"),
           py::arg("fusion_bytes_max"))
      .def("add", [](Coordinator& coordinator, const std::string& report, const Subtree& from,
                     double now) { coordinator.add(decode_report(report), from, time_of(now)); })
      .def("take_decision", &take_decision)
      .def("stalled", &stalled);
  py::class_<Relay>(module, "Relay")
      .def(py::init<const ProcessSets&, Ranks>(), py::keep_alive<1, 2>())
      .def("add", [](Relay& relay, const std::string& report, const Subtree& from,
                     const ResponseCache& cache,
                     double now) { relay.add(decode_report(report), from, cache, time_of(now)); })
      .def("take_report", &take_report)
      .def("withdraw", &Relay::withdraw)
      .def("remove", &Relay::remove)
      .def("end_turn", [](Relay& relay, ProcessSetId set, OpKind kind,
                          Turn turn) { relay.end_turn({set, kind, turn}); })
      .def("doom", &Relay::doom)
      .def("end_join", &Relay::end_join);
}
