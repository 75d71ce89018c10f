// Payloads as jobs send them: what the corpus begins with.
#include "control/wire.h"
#include "fuzz.h"

namespace polyhvd::fuzz {
namespace {

Request request(OpKind kind, std::vector<Shape> shapes, const std::string& name) {
  Request request;
  request.rank = 1;
  request.kind = kind;
  request.shapes = std::move(shapes);
  request.name = name;
  request.where = "train.py:88";
  return request;
}

std::vector<Request> requests() {
  std::vector<Request> all{
      request(OpKind::kAllreduce, {{10, 4}}, "DistributedOptimizer.gradient.4"),
      request(OpKind::kAllreduce, {{3}, {}, {0, 7}}, "group"),
      request(OpKind::kAllgather, {{5, 2}}, "rows"),
      request(OpKind::kBroadcast, {{2, 2}}, "weights"),
      request(OpKind::kBarrier, {}, "barrier"),
      request(OpKind::kAlltoall, {{6}}, "exchange"),
      request(OpKind::kReducescatter, {{8, 3}}, "shard"),
      request(OpKind::kJoin, {}, "join"),
      request(OpKind::kAddProcessSet, {{0}, {2}, {3}}, "add"),
      request(OpKind::kRemoveProcessSet, {}, "remove"),
  };
  all[0].scale = {0.5, 0.25};
  all[0].priority = -4;
  all[1].dtypes = {DType::kFloat32, DType::kFloat16, DType::kInt64};
  all[1].process_set = 3;
  all[3].root = 2;
  all[6].op = ReduceOp::kMax;
  all[9].root = 1;
  all[2].name = "allgather.noname.16";
  all[2].turn = 17;
  return all;
}

Definition definition(CacheId id, const Request& from) {
  Definition definition;
  definition.id = id;
  Agreement& agreement = definition.agreement;
  agreement.process_set = from.process_set;
  agreement.kind = from.kind;
  agreement.op = from.op;
  agreement.dtypes = from.dtypes;
  agreement.root = from.root;
  agreement.priority = from.priority;
  agreement.scale = from.scale;
  agreement.shapes = from.shapes;
  agreement.name = from.name;
  if (from.kind == OpKind::kAllgather) agreement.rows = {2, 0, 3};
  return definition;
}

template <class Message>
std::string encoded(const Message& message) {
  std::string payload;
  encode(message, payload);
  return payload;
}

}  // namespace

std::vector<std::pair<std::string, std::string>> seed_payloads() {
  std::vector<std::pair<std::string, std::string>> seeds;
  CacheId id = 1;
  for (const Request& each : requests()) {
    Report report;
    report.requests = {each};
    report.subtree_requests = {each, each};
    const std::string kind(name_of(each.kind));
    const std::string suffix = std::to_string(id);
    seeds.emplace_back("report-" + kind + "-" + suffix, encoded(report));
    Decision decision;
    decision.definitions = {definition(id, each)};
    decision.batches = {{{id}}};
    seeds.emplace_back("decision-" + kind + "-" + suffix, encoded(decision));
    ++id;
  }
  Report report;
  report.subtree_hits = {1, 2, 3};
  report.hits = {{0, 5}, {3, 6}};
  report.departures = {{4, "ValueError: bad row (train.py, line 31)"}};
  report.answers = {{2, 9}, {1, 9, 3}};
  report.subtree_turns = {{0, 4, 17}, {0, 4, 18}};
  report.turns = {{2, 4, 19}};
  seeds.emplace_back("report-hits", encoded(report));
  Decision decision;
  decision.resends = {{1, 8}, {0, 4, 20}};
  decision.refusals = {
      {2, "x", {ErrorCode::kRankMismatch, "Mismatched data types: ..."}},
      {0, "", {ErrorCode::kPeerDeparted, ""}},
      {0, "allreduce.noname.4", {ErrorCode::kRankMismatch, "..."}, OpKind::kAllreduce, 5}};
  decision.batches = {{{9, 4, 4}, {0, 17, 18}}, {{7}}};
  decision.evictions = {3, 1};
  seeds.emplace_back("decision-batches", encoded(decision));
  seeds.emplace_back("abort", encoded(Error{ErrorCode::kPeerLost, "rank 2 died"}));
  std::string farewell;
  encode_farewell({0, "ValueError: bad row (train.py, line 31)"}, farewell);
  seeds.emplace_back("farewell", farewell);
  seeds.emplace_back("inquiry", encoded(Inquiry{7, {0, 1, 3}}));
  seeds.emplace_back("answer", encoded(Answer{7, 3, true, "alive, in load (train.py:88)\n  at"}));
  seeds.emplace_back("tuning", encoded(Tuning{}));
  return seeds;
}

}  // namespace polyhvd::fuzz
