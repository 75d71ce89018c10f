#include <doctest/doctest.h>

#include <functional>

#include "control/response_cache.h"

namespace polyhvd {
namespace {

Request request_for(OpKind kind, std::vector<Shape> shapes) {
  Request request;
  request.kind = kind;
  request.name = std::string("x");
  request.shapes = std::move(shapes);
  request.root = kind == OpKind::kBroadcast ? 1 : -1;
  return request;
}

Agreement agreement_on(const Request& request) {
  Agreement agreement;
  agreement.process_set = request.process_set;
  agreement.kind = request.kind;
  agreement.op = request.op;
  agreement.dtype = request.dtype;
  agreement.device = request.device;
  agreement.root = request.root;
  agreement.priority = request.priority;
  agreement.scale = request.scale;
  agreement.shapes = request.shapes;
  agreement.name = request.name;
  return agreement;
}

bool still_satisfies(Request request, const std::function<void(Request&)>& change) {
  const Agreement agreement = agreement_on(request);
  REQUIRE(satisfies(agreement, request, 0));
  change(request);
  return satisfies(agreement, request, 0);
}

// Two members with 2 and 3 rows of the first tensor, 1 and 0 of the second.
Agreement gathered() {
  Agreement agreement = agreement_on(request_for(OpKind::kAllgather, {{5, 4}, {1}}));
  agreement.rows = {2, 1, 3, 0};
  return agreement;
}

TEST_CASE("what makes an operation another one does so for every kind") {
  for (const OpKind kind : {OpKind::kAllreduce, OpKind::kBroadcast, OpKind::kBarrier}) {
    const Request request = request_for(kind, {{2, 3}});
    CHECK_FALSE(still_satisfies(request, [](Request& r) { r.name = std::string("y"); }));
    CHECK_FALSE(still_satisfies(request, [](Request& r) { r.process_set = 1; }));
    CHECK_FALSE(still_satisfies(request, [](Request& r) { r.dtype = DType::kInt8; }));
    CHECK_FALSE(still_satisfies(request, [](Request& r) { r.device = DeviceKind::kCuda; }));
    CHECK_FALSE(still_satisfies(request, [&](Request& r) {
      r.kind = kind == OpKind::kBarrier ? OpKind::kAllreduce : OpKind::kBarrier;
    }));
  }
}

TEST_CASE("priority, rank and the caller's line never matter") {
  for (const OpKind kind : {OpKind::kAllreduce, OpKind::kBroadcast, OpKind::kBarrier}) {
    CHECK(still_satisfies(request_for(kind, {{2}}), [](Request& r) {
      r.priority = 9;
      r.rank = 3;
      r.where = "elsewhere.py:1";
    }));
  }
}

TEST_CASE("an allreduce depends on op, scale and every shape") {
  const Request request = request_for(OpKind::kAllreduce, {{2, 3}, {4}});
  CHECK_FALSE(still_satisfies(request, [](Request& r) { r.op = ReduceOp::kMax; }));
  CHECK_FALSE(still_satisfies(request, [](Request& r) { r.scale.pre = 0.5; }));
  CHECK_FALSE(still_satisfies(request, [](Request& r) { r.scale.post = 0.5; }));
  CHECK_FALSE(still_satisfies(request, [](Request& r) { r.shapes[1] = {5}; }));
  CHECK_FALSE(still_satisfies(request, [](Request& r) { r.shapes.pop_back(); }));
  CHECK(still_satisfies(request, [](Request& r) { r.root = 5; }));
}

TEST_CASE("a broadcast depends on root and shapes, not on a reduction") {
  const Request request = request_for(OpKind::kBroadcast, {{2, 3}});
  CHECK_FALSE(still_satisfies(request, [](Request& r) { r.root = 0; }));
  CHECK_FALSE(still_satisfies(request, [](Request& r) { r.shapes[0] = {3, 2}; }));
  CHECK(still_satisfies(request, [](Request& r) { r.op = ReduceOp::kMin; }));
}

TEST_CASE("a barrier depends on nothing more") {
  CHECK(still_satisfies(request_for(OpKind::kBarrier, {}), [](Request& r) {
    r.op = ReduceOp::kMin;
    r.root = 2;
    r.shapes = {{7}};
  }));
}

TEST_CASE("an allgather is found by each position with its own rows") {
  const Agreement agreement = gathered();
  CHECK(satisfies(agreement, request_for(OpKind::kAllgather, {{2, 4}, {1}}), 0));
  CHECK(satisfies(agreement, request_for(OpKind::kAllgather, {{3, 4}, {0}}), 1));
  CHECK_FALSE(satisfies(agreement, request_for(OpKind::kAllgather, {{3, 4}, {0}}), 0));
  CHECK_FALSE(satisfies(agreement, request_for(OpKind::kAllgather, {{2, 5}, {1}}), 0));
  CHECK_FALSE(satisfies(agreement, request_for(OpKind::kAllgather, {{2, 4}}), 0));
  CHECK_FALSE(satisfies(agreement, request_for(OpKind::kAllgather, {{2, 4}, {1, 1}}), 0));
}

TEST_CASE("an allgather of a scalar or from a strange position is not found") {
  const Agreement agreement = gathered();
  CHECK_FALSE(satisfies(agreement, request_for(OpKind::kAllgather, {{}, {1}}), 0));
  CHECK_FALSE(satisfies(agreement, request_for(OpKind::kAllgather, {{2, 4}, {1}}), 2));
  CHECK_FALSE(satisfies(agreement, request_for(OpKind::kAllgather, {{2, 4}, {1}}), -1));
}

TEST_CASE("one name in two process sets is two operations") {
  ResponseCache cache;
  Request request = request_for(OpKind::kAllreduce, {{2}});
  cache.define({1, agreement_on(request)});
  request.process_set = 1;
  CHECK_FALSE(cache.find(request, 0));
  cache.define({2, agreement_on(request)});
  CHECK(cache.find(request, 0) == 2);
  CHECK(cache.id_of(0, "x") == 1);
  CHECK(cache.size() == 2);
}

TEST_CASE("a changed request keeps its name's id but is not found") {
  ResponseCache cache;
  Request request = request_for(OpKind::kAllreduce, {{2}});
  cache.define({1, agreement_on(request)});
  request.shapes = {{3}};
  CHECK_FALSE(cache.find(request, 0));
  CHECK(cache.id_of(0, "x") == 1);
}

TEST_CASE("evicting the id that a name had before leaves the name's new id") {
  ResponseCache cache;
  Request request = request_for(OpKind::kAllreduce, {{2}});
  cache.define({1, agreement_on(request)});
  request.shapes = {{3}};
  cache.define({2, agreement_on(request)});
  REQUIRE(cache.get(1) != nullptr);  // a batch of the same decision may still need it
  CHECK(cache.get(1)->shapes == std::vector<Shape>{{2}});
  cache.evict(1);
  CHECK(cache.get(1) == nullptr);
  CHECK(cache.find(request, 0) == 2);
}

TEST_CASE("an evicted id is forgotten with its name, and unknown ids are ignored") {
  ResponseCache cache;
  cache.define({1, agreement_on(request_for(OpKind::kAllreduce, {{2}}))});
  cache.evict(7);
  cache.evict(1);
  cache.evict(1);
  CHECK(cache.get(1) == nullptr);
  CHECK_FALSE(cache.id_of(0, "x"));
  CHECK(cache.size() == 0);
}

TEST_CASE("an agreement stays where it is while others come and go") {
  ResponseCache cache;
  Request request = request_for(OpKind::kAllreduce, {{2}});
  cache.define({1, agreement_on(request)});
  const Agreement* const before = cache.get(1);
  for (CacheId id = 2; id < 500; ++id) {
    request.name = std::to_string(id);
    cache.define({id, agreement_on(request)});
    if (id % 2 == 0) cache.evict(id);
  }
  CHECK(cache.get(1) == before);
}

}  // namespace
}  // namespace polyhvd
