#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <stdexcept>

#include "control/coordinator.h"
#include "control/relay.h"
#include "control/wire.h"

namespace polyhvd {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// ---- one call after the other -----------------------------------------------------

Request allreduce(int rank, const std::string& name = "x", Shape shape = {10, 4}) {
  Request request;
  request.rank = rank;
  request.name = name;
  request.shapes = {std::move(shape)};
  request.where = std::string("train.py:91");
  return request;
}

Request allgather(int rank, std::int64_t rows, const std::string& name = "g") {
  Request request = allreduce(rank, name, {rows, 4});
  request.kind = OpKind::kAllgather;
  return request;
}

// A coordinator whose reports come from one rank each.
class Desk {
 public:
  explicit Desk(int world_size, CoordinatorOptions options = {})
      : sets(world_size), coordinator(sets, options) {}

  void request(const Request& request) { add({.requests = {request}}, {request.rank}); }
  void hit(int rank, CacheId id) { add({.hits = {{rank, id}}}, {rank}); }
  void depart(int rank, const std::string& words = {}) {
    add({.departures = {{rank, words}}}, {rank});
  }
  void subtree_hit(std::vector<int> ranks, CacheId id) { add({.subtree_hits = {id}}, ranks); }
  void subtree_request(std::vector<int> ranks, const Request& request) {
    add({.subtree_requests = {request}}, ranks);
  }
  void add(const Report& report, const std::vector<int>& from) {
    coordinator.add(report, Subtree(sets, from), now);
  }
  Decision take() { return coordinator.take_decision(); }

  // Has all members ask for the same and returns the id that they agreed on.
  CacheId agree(Request request) {
    for (const int rank : sets.members(request.process_set)) {
      request.rank = rank;
      this->request(request);
    }
    const Decision decision = take();
    REQUIRE(decision.definitions.size() == 1);
    return decision.definitions[0].id;
  }

  // The refusal's text when the given requests meet.
  std::string refusal_of(const std::vector<Request>& requests) {
    for (const Request& request : requests) this->request(request);
    const Decision decision = take();
    REQUIRE(decision.refusals.size() == 1);
    CHECK(decision.refusals[0].error.code == ErrorCode::kRankMismatch);
    CHECK(decision.refusals[0].name == requests[0].name);
    CHECK(decision.batches.empty());
    CHECK(decision.definitions.empty());
    return decision.refusals[0].error.message;
  }

  ProcessSets sets;
  Coordinator coordinator;
  Time now{};
};

std::vector<std::vector<CacheId>> ids_of(const Decision& decision) {
  std::vector<std::vector<CacheId>> all;
  for (const Batch& batch : decision.batches) all.push_back(batch.ids);
  return all;
}

TEST_CASE("an operation runs once all members have asked, with its definition") {
  Desk desk(3);
  desk.request(allreduce(2));
  desk.request(allreduce(0));
  CHECK_FALSE(desk.coordinator.has_decision());
  desk.request(allreduce(1));
  CHECK(desk.coordinator.has_decision());
  const Decision decision = desk.take();
  REQUIRE(decision.definitions.size() == 1);
  CHECK(decision.definitions[0].agreement.name == "x");
  CHECK(decision.definitions[0].agreement.shapes == std::vector<Shape>{{10, 4}});
  CHECK(ids_of(decision) == std::vector<std::vector<CacheId>>{{decision.definitions[0].id}});
  CHECK(desk.take().empty());
}

TEST_CASE("a subtree's request stands for its ranks, with their rows") {
  Desk desk(4);
  desk.subtree_request({1, 3}, allgather(1, 5));
  desk.request(allgather(2, 7));
  CHECK_FALSE(desk.coordinator.has_decision());
  desk.request(allgather(0, 5));
  const Decision decision = desk.take();
  REQUIRE(decision.definitions.size() == 1);
  CHECK(decision.definitions[0].agreement.rows == std::vector<std::int64_t>{5, 5, 7, 5});
  CHECK(decision.definitions[0].agreement.shapes[0][0] == 22);
  desk.subtree_request({0, 1, 2, 3}, allgather(0, 2));
  const Decision alike = desk.take();
  REQUIRE(alike.definitions.size() == 1);
  CHECK(alike.definitions[0].agreement.rows == std::vector<std::int64_t>{2, 2, 2, 2});
}

TEST_CASE("a disagreement names the ranks that a subtree's request stood for") {
  Desk desk(4);
  Request other = allreduce(1);
  other.dtype = DType::kFloat64;
  desk.subtree_request({1, 3}, other);
  desk.subtree_request({0, 2}, allreduce(0));
  const Decision decision = desk.take();
  REQUIRE(decision.refusals.size() == 1);
  const std::string& message = decision.refusals[0].error.message;
  CHECK(message.find("ranks 0, 2") != std::string::npos);
  CHECK(message.find("ranks 1, 3") != std::string::npos);
}

TEST_CASE("a subtree's request meets hits, joins, departures and the end of its set") {
  Desk desk(4);
  desk.agree(allreduce(0));
  desk.hit(2, 1);
  desk.subtree_request({0, 1, 3}, allreduce(0));
  CHECK(ids_of(desk.take()) == std::vector<std::vector<CacheId>>{{1}});

  Request join = allreduce(3);
  join.kind = OpKind::kJoin;
  join.name = "join";
  desk.request(join);
  desk.subtree_request({0, 1, 2}, allreduce(0, "y"));
  CHECK(desk.take().definitions.size() == 1);
  desk.request(allreduce(1, "z"));
  CHECK_THROWS_AS(desk.subtree_request({0, 1}, allreduce(0, "z")), Failure);

  Desk left(3);
  left.depart(2);
  left.subtree_request({0, 1}, allreduce(0));
  REQUIRE(left.take().refusals.size() == 1);

  Desk removed(3);
  const ProcessSetId set = removed.sets.add({0, 1});
  removed.sets.remove(set);
  Request late = allreduce(0);
  late.process_set = set;
  removed.subtree_request({0, 1}, late);
  REQUIRE(removed.take().refusals.size() == 1);
}

TEST_CASE("a known operation runs once all members have hit it, without a definition") {
  Desk desk(3);
  const CacheId id = desk.agree(allreduce(0));
  for (int step = 0; step < 3; ++step) {
    desk.hit(1, id);
    desk.subtree_hit({0, 2}, id);
    const Decision decision = desk.take();
    CHECK(decision.definitions.empty());
    CHECK(ids_of(decision) == std::vector<std::vector<CacheId>>{{id}});
  }
}

TEST_CASE("only members of its process set are needed") {
  Desk desk(4);
  Request request = allreduce(1);
  request.process_set = desk.sets.add({1, 3});
  const CacheId id = desk.agree(request);
  desk.subtree_hit({0, 1, 2}, id);
  CHECK_FALSE(desk.coordinator.has_decision());
  desk.subtree_hit({3}, id);
  CHECK(ids_of(desk.take()) == std::vector<std::vector<CacheId>>{{id}});
}

TEST_CASE("an allgather adds up the rows in the order of the members") {
  Desk desk(3);
  desk.request(allgather(2, 5));
  desk.request(allgather(0, 1));
  desk.request(allgather(1, 0));
  const Agreement agreement = desk.take().definitions.at(0).agreement;
  CHECK(agreement.rows == std::vector<std::int64_t>{1, 0, 5});
  CHECK(agreement.shapes == std::vector<Shape>{{6, 4}});
}

TEST_CASE("new rows of one member replace the id, and hits of the others count") {
  Desk desk(3);
  desk.request(allgather(0, 1));
  desk.request(allgather(1, 2));
  desk.request(allgather(2, 3));
  const CacheId old = desk.take().definitions.at(0).id;
  SUBCASE("hit before the request") {
    desk.hit(0, old);
    desk.request(allgather(1, 7));
    desk.hit(2, old);
  }
  SUBCASE("request before the hits") {
    desk.request(allgather(1, 7));
    desk.subtree_hit({0, 2}, old);
  }
  SUBCASE("hits before the request, as a subtree") {
    desk.subtree_hit({0, 2}, old);
    desk.request(allgather(1, 7));
  }
  const Decision decision = desk.take();
  REQUIRE(decision.definitions.size() == 1);
  CHECK(decision.definitions[0].id != old);
  CHECK(decision.definitions[0].agreement.rows == std::vector<std::int64_t>{1, 7, 3});
  CHECK(ids_of(decision) == std::vector<std::vector<CacheId>>{{decision.definitions[0].id}});
  CHECK(decision.evictions == std::vector<CacheId>{old});
  desk.hit(0, old);
  REQUIRE(desk.take().resends.size() == 1);
}

TEST_CASE("a request in full for what is known keeps the id") {
  Desk desk(2);
  const CacheId id = desk.agree(allreduce(0));
  desk.hit(1, id);
  Request request = allreduce(0);
  request.priority = 9;  // the coordinator's value wins
  desk.request(request);
  const Decision decision = desk.take();
  CHECK(decision.definitions.empty());
  CHECK(decision.evictions.empty());
  CHECK(ids_of(decision) == std::vector<std::vector<CacheId>>{{id}});
}

TEST_CASE("a hit for an evicted id is asked for in full, of every rank it spoke for") {
  Desk desk(3, {.cache_capacity = 1, .fusion = {}});
  const CacheId old = desk.agree(allreduce(0, "x"));
  desk.agree(allreduce(0, "y"));  // evicts x
  desk.subtree_hit({0, 1}, old);
  desk.hit(2, old);
  const Decision decision = desk.take();
  REQUIRE(decision.resends.size() == 3);
  for (int rank = 0; rank < 3; ++rank) {
    const Resend& resend = decision.resends[static_cast<std::size_t>(rank)];
    CHECK(resend.rank == rank);
    CHECK(resend.id == old);
  }
  CHECK(desk.agree(allreduce(0, "x")) != old);
}

TEST_CASE("the least recently used id is evicted, in the decision that needs the place") {
  Desk desk(1, {.cache_capacity = 2, .fusion = {}});
  const CacheId x = desk.agree(allreduce(0, "x"));
  const CacheId y = desk.agree(allreduce(0, "y"));
  desk.hit(0, x);
  CHECK(desk.take().evictions.empty());
  desk.request(allreduce(0, "z"));
  CHECK(desk.take().evictions == std::vector<CacheId>{y});
}

TEST_CASE("an id that somebody waits for is not evicted") {
  Desk desk(2, {.cache_capacity = 2, .fusion = {}});
  const CacheId x = desk.agree(allreduce(0, "x"));
  const CacheId y = desk.agree(allreduce(0, "y"));
  desk.hit(0, x);
  desk.request(allreduce(0, "z"));
  desk.request(allreduce(1, "z"));
  CHECK(desk.take().evictions == std::vector<CacheId>{y});
  desk.hit(1, x);
  CHECK(ids_of(desk.take()) == std::vector<std::vector<CacheId>>{{x}});
}

TEST_CASE("ids that run in a decision are evicted by it only when nothing else can be") {
  Desk desk(1, {.cache_capacity = 2, .fusion = {}});
  const CacheId x = desk.agree(allreduce(0, "x"));
  const CacheId y = desk.agree(allreduce(0, "y"));
  desk.hit(0, x);
  desk.request(allreduce(0, "z"));
  CHECK(desk.take().evictions == std::vector<CacheId>{y});
  desk.hit(0, x);
  desk.request(allreduce(0, "v"));
  desk.request(allreduce(0, "w"));
  CHECK(desk.take().evictions.size() == 2);
}

TEST_CASE("without a cache each id is defined, run and evicted at once") {
  Desk desk(2, {.cache_capacity = 0, .fusion = {}});
  CacheId last = 0;
  for (int step = 0; step < 3; ++step) {
    desk.request(allreduce(0));
    desk.request(allreduce(1));
    const Decision decision = desk.take();
    REQUIRE(decision.definitions.size() == 1);
    const CacheId id = decision.definitions[0].id;
    CHECK(id != last);
    CHECK(ids_of(decision) == std::vector<std::vector<CacheId>>{{id}});
    CHECK(decision.evictions == std::vector<CacheId>{id});
    last = id;
  }
}

TEST_CASE("what is ready at one time is fused") {
  Desk desk(2);
  const CacheId x = desk.agree(allreduce(0, "x"));
  const CacheId y = desk.agree(allreduce(0, "y"));
  desk.add({.subtree_hits = {x, y}}, {0, 1});
  CHECK(ids_of(desk.take()) == std::vector<std::vector<CacheId>>{{x, y}});
}

TEST_CASE("a rank that reports a pending operation twice breaks the protocol") {
  Desk desk(3);
  const CacheId id = desk.agree(allreduce(0));
  const auto check_thrown = [&](const std::function<void()>& call) {
    try {
      call();
      FAIL("accepted");
    } catch (const Failure& failure) {
      CHECK(failure.error().code == ErrorCode::kInternal);
    }
  };
  SUBCASE("by hits") {
    desk.hit(0, id);
    check_thrown([&] { desk.hit(0, id); });
  }
  SUBCASE("alone and within a subtree") {
    desk.hit(0, id);
    check_thrown([&] { desk.subtree_hit({0, 1}, id); });
  }
  SUBCASE("in full") {
    desk.request(allreduce(0, "new"));
    check_thrown([&] { desk.request(allreduce(0, "new")); });
  }
  SUBCASE("by a hit, then in full") {
    desk.hit(0, id);
    check_thrown([&] { desk.request(allreduce(0)); });
  }
  SUBCASE("in full, then by a hit") {
    desk.request(allreduce(0));
    check_thrown([&] { desk.hit(0, id); });
  }
  SUBCASE("agreed and not yet announced") {
    desk.subtree_hit({0, 1, 2}, id);
    check_thrown([&] { desk.hit(1, id); });
    check_thrown([&] { desk.request(allreduce(1)); });
  }
}

TEST_CASE("reports about sets that a rank is not in break the protocol") {
  Desk desk(3);
  Request request = allreduce(0);
  request.process_set = desk.sets.add({0, 1});
  const CacheId id = desk.agree(request);
  CHECK_THROWS_AS(desk.hit(2, id), Failure);
  CHECK_THROWS_AS(desk.subtree_hit({2}, id), Failure);
  request.rank = 2;
  CHECK_THROWS_AS(desk.request(request), Failure);
  request.rank = 0;
  request.process_set = 77;
  CHECK_THROWS_AS(desk.request(request), Failure);
  CHECK_THROWS_AS(desk.depart(3), Failure);
}

TEST_CASE(
    "what is ready together with the removal of its set runs before, whatever the priorities") {
  Desk desk(2);
  Request inside = allreduce(0, "inside");
  inside.process_set = desk.sets.add({0, 1});
  inside.priority = -5;
  Request removal = allreduce(0, "removal", {});
  removal.kind = OpKind::kRemoveProcessSet;
  removal.root = static_cast<std::int32_t>(inside.process_set);
  for (const int rank : {0, 1}) {
    for (Request request : {removal, inside}) {
      request.rank = rank;
      desk.request(request);
    }
  }
  const Decision decision = desk.take();
  REQUIRE(decision.definitions.size() == 2);
  CHECK(decision.definitions[1].agreement.name == "inside");
  CHECK(ids_of(decision) == std::vector<std::vector<CacheId>>{{decision.definitions[1].id},
                                                              {decision.definitions[0].id}});
  CHECK(decision.refusals.empty());
}

// ---- disagreement -----------------------------------------------------------------

TEST_CASE("a disagreement names every rank's side, the odd one out first") {
  Desk desk(4);
  std::vector<Request> requests;
  for (int rank = 0; rank < 4; ++rank) requests.push_back(allreduce(rank, "fc.weight"));
  requests[3].dtype = DType::kFloat16;
  requests[3].where = std::string("train.py:88");
  CHECK(desk.refusal_of(requests) ==
        "Mismatched data types: allreduce 'fc.weight': rank 3 sent float16 [10, 4] (train.py:88); "
        "ranks 0-2 sent float32 [10, 4] (train.py:91); cast before reducing.");
}

TEST_CASE("a rank's side is reported too when it came as a hit, with its own rows and line") {
  Desk desk(2);
  Request first = allgather(0, 2), second = allgather(1, 3);
  second.where = std::string("other.py:5");
  desk.request(first);
  desk.request(second);
  const CacheId id = desk.take().definitions.at(0).id;
  desk.hit(1, id);
  first.dtype = DType::kInt32;
  CHECK(desk.refusal_of({first}) ==
        "Mismatched data types: allgather 'g': rank 0 sent int32 [2, 4] (train.py:91); "
        "rank 1 sent float32 [3, 4] (other.py:5); cast before gathering.");
  // The agreement from before is still good.
  desk.subtree_hit({0, 1}, id);
  CHECK(ids_of(desk.take()) == std::vector<std::vector<CacheId>>{{id}});
}

struct Mismatch {
  const char* start;
  OpKind kind;
  std::function<void(Request&)> change;
  const char* side;  // what the changed rank is said to have sent
};

TEST_CASE("each kind of disagreement is reported as what it is") {
  const Mismatch mismatches[] = {
      {"Mismatched collective operations: 'x': ", OpKind::kAllreduce,
       [](Request& r) { r.kind = OpKind::kAllgather; }, "rank 1 sent allgather of float32 [10, 4]"},
      {"Mismatched collective operations: 'x': ", OpKind::kAllreduce,
       [](Request& r) { r.kind = OpKind::kBarrier; }, "rank 1 sent barrier (train.py:91)"},
      {"Mismatched data types: broadcast 'x': ", OpKind::kBroadcast,
       [](Request& r) { r.dtype = DType::kInt8; }, "rank 1 sent int8 [10, 4]"},
      {"Mismatched allreduce tensor shapes: allreduce 'x': ", OpKind::kAllreduce,
       [](Request& r) { r.shapes = {{4, 10}}; }, "rank 1 sent float32 [4, 10]"},
      {"Mismatched broadcast tensor shapes: broadcast 'x': ", OpKind::kBroadcast,
       [](Request& r) { r.shapes = {{}}; }, "rank 1 sent float32 []"},
      {"Mismatched allgather tensor shapes: allgather 'x': ", OpKind::kAllgather,
       [](Request& r) { r.shapes = {{10, 5}}; }, "all dimensions except the first must match"},
      {"Mismatched reduction operations: allreduce 'x': ", OpKind::kAllreduce,
       [](Request& r) { r.op = ReduceOp::kMax; }, "float32 [10, 4] with op Max"},
      {"Mismatched prescale and/or postscale factors: allreduce 'x': ", OpKind::kAllreduce,
       [](Request& r) { r.scale.post = 0.1; }, "with prescale 1 and postscale 0.1 "},
      {"Mismatched root ranks: broadcast 'x': ", OpKind::kBroadcast, [](Request& r) { r.root = 1; },
       "rank 1 sent float32 [10, 4] with root rank 1"},
      {"Mismatched devices: allreduce 'x': ", OpKind::kAllreduce,
       [](Request& r) { r.device = DeviceKind::kCuda; }, "float32 [10, 4] on a GPU"},
      {"Mismatched numbers of tensors: allreduce 'x': ", OpKind::kAllreduce,
       [](Request& r) { r.shapes.push_back({3}); }, "rank 1 sent 2 tensors, float32 [10, 4], [3]"},
  };
  for (const Mismatch& mismatch : mismatches) {
    Desk desk(3);
    std::vector<Request> requests;
    for (int rank = 0; rank < 3; ++rank) {
      requests.push_back(allreduce(rank));
      requests.back().kind = mismatch.kind;
      requests.back().root = mismatch.kind == OpKind::kBroadcast ? 0 : -1;
    }
    mismatch.change(requests[1]);
    const std::string text = desk.refusal_of(requests);
    CAPTURE(text);
    CHECK(text.starts_with(mismatch.start));
    CHECK(text.find(mismatch.side) != std::string::npos);
    CHECK(text.find("ranks 0, 2 sent ") != std::string::npos);
    CHECK(text.ends_with("."));
  }
}

TEST_CASE("of several tensors the one that differs is named") {
  Desk desk(2);
  Request first = allreduce(0), second = allreduce(1);
  first.shapes = {{1}, {2}, {3}, {4}, {5}, {6}};
  second.shapes = first.shapes;
  second.shapes[4] = {7};
  const std::string text = desk.refusal_of({first, second});
  CHECK(text.find("rank 1 sent tensor 4 of 6 as float32 [7]") != std::string::npos);
}

TEST_CASE("a side of many tensors names the first two") {
  Desk desk(2);
  Request first = allreduce(0), second = allreduce(1);
  first.shapes = {{1}, {2}, {3}, {4}, {5}, {6}};
  second.shapes = first.shapes;
  second.dtype = DType::kInt32;
  const std::string text = desk.refusal_of({first, second});
  CHECK(text.find("rank 1 sent int32 [1], [2], ... (6 tensors) (") != std::string::npos);
}

TEST_CASE("factors that differ a little do not look alike") {
  Desk desk(2);
  Request first = allreduce(0), second = allreduce(1);
  first.scale.post = 0.1;
  second.scale.post = std::nextafter(0.1, 1.0);
  const std::string text = desk.refusal_of({first, second});
  CHECK(text.find("postscale 0.1 ") != std::string::npos);
  CHECK(text.find("postscale 0.10000000000000002 ") != std::string::npos);
}

TEST_CASE("a thousand ranks that agree take one line") {
  Desk desk(1000);
  std::vector<Request> requests;
  for (int rank = 0; rank < 1000; ++rank) {
    requests.push_back(allgather(rank, rank));
    if (rank == 500) requests.back().dtype = DType::kFloat64;
  }
  const std::string text = desk.refusal_of(requests);
  CHECK(text ==
        "Mismatched data types: allgather 'g': rank 500 sent float64 [*, 4] (train.py:91); "
        "ranks 0-499, 501-999 sent float32 [*, 4] (train.py:91); cast before gathering.");
}

TEST_CASE("an allgather of scalars or of too many rows is refused on every rank") {
  Desk desk(2);
  Request request = allgather(0, 1);
  SUBCASE("scalars") { request.shapes = {{}}; }
  SUBCASE("rows") { request.shapes = {{std::numeric_limits<std::int64_t>::max(), 1}}; }
  desk.request(request);
  request.rank = 1;
  desk.request(request);
  const Decision decision = desk.take();
  REQUIRE(decision.refusals.size() == 1);
  CHECK(decision.refusals[0].error.code == ErrorCode::kInvalidArgument);
}

TEST_CASE("a scalar against rows is a mismatch of shapes") {
  Desk desk(2);
  Request scalar = allgather(1, 1);
  scalar.shapes = {{}};
  CHECK(
      desk.refusal_of({allgather(0, 1), scalar}).starts_with("Mismatched allgather tensor shapes"));
}

// ---- departures -------------------------------------------------------------------

TEST_CASE("whatever waits for a departed rank is refused, by name, by id and agreed") {
  Desk desk(3);
  const CacheId hit = desk.agree(allreduce(0, "hit"));
  const CacheId agreed = desk.agree(allreduce(0, "agreed"));
  desk.hit(0, hit);
  desk.request(allreduce(1, "asked"));
  desk.subtree_hit({0, 1, 2}, agreed);
  desk.depart(2);
  const Decision decision = desk.take();
  CHECK(decision.batches.empty());
  std::vector<std::string> messages;
  for (const Refusal& refusal : decision.refusals) {
    CHECK(refusal.error.code == ErrorCode::kPeerDeparted);
    messages.push_back(refusal.error.message);
  }
  std::sort(messages.begin(), messages.end());
  const std::string cure =
      "give every rank the same number of batches, or call hvd.join() on every rank when its data "
      "ends";
  CHECK(
      messages ==
      std::vector<std::string>{
          "allreduce 'agreed' needs rank 2, which has shut down",
          "allreduce 'asked' needs rank 2, which has shut down: it finished without any allreduce "
          "of 'asked', while rank 1 is at its first: make the same calls on every rank; if "
          "only the amount of data differs, " +
              cure,
          "allreduce 'hit' needs rank 2, which has shut down: it finished after its 1st allreduce "
          "of 'hit', while rank 0 is at its 2nd: " +
              cure});
  CHECK(desk.coordinator.stalled(desk.now + seconds(9), seconds(0)).empty());
}

TEST_CASE("what needs a departed rank later is refused at the first report, and each later one") {
  Desk desk(3);
  const CacheId id = desk.agree(allreduce(0, "x"));
  desk.depart(1);
  desk.depart(1);
  CHECK(desk.take().empty());
  desk.hit(0, id);
  CHECK(desk.take().refusals.size() == 1);
  desk.request(allreduce(2, "x"));
  CHECK(desk.take().refusals.size() == 1);
  desk.request(allreduce(0, "y"));
  const Decision decision = desk.take();
  REQUIRE(decision.refusals.size() == 1);
  CHECK(decision.refusals[0].name == "y");
}

TEST_CASE("sets without the departed rank go on, and both of two departed are named") {
  Desk desk(4);
  Request request = allreduce(0);
  request.process_set = desk.sets.add({0, 1});
  const CacheId id = desk.agree(request);
  desk.depart(2);
  desk.depart(3);
  desk.subtree_hit({0, 1}, id);
  CHECK(ids_of(desk.take()) == std::vector<std::vector<CacheId>>{{id}});
  desk.request(allreduce(0));
  CHECK(desk.take().refusals.at(0).error.message.starts_with(
      "allreduce 'x' needs ranks 2, 3, which have shut down: they finished "));
}

TEST_CASE("last words of a departed rank are the reason for whatever needs it, now and later") {
  Desk desk(3);
  const CacheId hit = desk.agree(allreduce(0, "hit"));
  desk.hit(0, hit);
  desk.request(allreduce(1, "asked"));
  desk.depart(2, "has failed: ValueError: bad row");
  desk.hit(1, hit);
  desk.request(allreduce(0, "later"));
  const Decision decision = desk.take();
  REQUIRE(decision.refusals.size() == 4);
  for (const Refusal& refusal : decision.refusals) {
    CHECK(refusal.error.code == ErrorCode::kPeerDeparted);
    CHECK(refusal.error.message ==
          "allreduce '" + refusal.name + "': rank 2 has failed: ValueError: bad row");
    CHECK(refusal.cause == Departure{2, "has failed: ValueError: bad row"});
  }
}

TEST_CASE("of several departed ranks of a set the first that has last words is the reason") {
  Desk desk(4);
  Request pair = allreduce(0, "x");
  pair.process_set = desk.sets.add({0, 1});
  desk.depart(1);
  desk.depart(3, "has failed: ValueError: bad row");
  desk.depart(2, "has failed: KeyError: 'x'");
  desk.request(allreduce(0, "x"));
  CHECK(desk.take().refusals.at(0).error.message ==
        "allreduce 'x': rank 3 has failed: ValueError: bad row");
  desk.request(pair);
  const Decision decision = desk.take();
  CHECK(decision.refusals.at(0).error.message.starts_with(
      "allreduce 'x' needs rank 1, which has shut down"));
  CHECK(decision.refusals.at(0).cause == Departure{});
}

TEST_CASE("a departure in the middle of a renegotiation leaves no trace of it") {
  Desk desk(3, {.cache_capacity = 1, .fusion = {}});
  const CacheId id = desk.agree(allreduce(0));
  desk.hit(0, id);
  desk.request(allreduce(1, "x", {7}));
  desk.depart(2);
  CHECK(desk.take().refusals.size() == 1);
  desk.hit(1, id);
  const Decision decision = desk.take();
  CHECK(decision.refusals.size() == 1);
  CHECK(decision.resends.empty());
  Request other = allreduce(0, "y");
  other.process_set = desk.sets.add({0});
  desk.request(other);
  CHECK(desk.take().evictions == std::vector<CacheId>{id});
}

// ---- stalls -----------------------------------------------------------------------

TEST_CASE("stalled operations are reported with the absent ranks, the oldest first") {
  Desk desk(3);
  const CacheId id = desk.agree(allreduce(0, "cached"));
  desk.request(allreduce(1, "asked"));
  desk.now += seconds(2);
  desk.hit(2, id);
  desk.now += seconds(1);
  desk.request(allreduce(0, "asked"));
  desk.request(allreduce(0, "young"));
  const auto stalled = desk.coordinator.stalled(desk.now, seconds(1));
  REQUIRE(stalled.size() == 2);
  CHECK(stalled[0].name == "asked");
  CHECK(stalled[0].age == seconds(3));
  CHECK(stalled[0].ready_ranks == std::vector<int>{0, 1});
  CHECK(stalled[0].absent_ranks == std::vector<int>{2});
  CHECK(stalled[1].name == "cached");
  CHECK(stalled[1].age == seconds(1));
  CHECK(stalled[1].ready_ranks == std::vector<int>{2});
  CHECK(stalled[1].absent_ranks == std::vector<int>{0, 1});
}

TEST_CASE(
    "a stalled operation has the line of its call, as a hit that of the call that was agreed on") {
  Desk desk(3);
  Request cached = allreduce(0, "cached");
  cached.where = "train.py:7";
  const CacheId id = desk.agree(cached);
  Request asked = allreduce(1, "asked");
  asked.where = "train.py:8";
  desk.request(asked);
  desk.now += seconds(2);
  desk.hit(2, id);
  const auto stalled = desk.coordinator.stalled(desk.now, seconds(0));
  REQUIRE(stalled.size() == 2);
  CHECK(stalled[0].where == "train.py:8");
  CHECK(stalled[1].where == "train.py:7");
}

TEST_CASE("an operation that no rank waits for is no stall") {
  Desk desk(3);
  desk.request(allgather(0, 1, "polyhvd.data/ParquetLoader(train.py:12).0123.1"));
  desk.request(allreduce(1, "asked"));
  desk.now += seconds(2);
  const auto stalled = desk.coordinator.stalled(desk.now, seconds(1));
  REQUIRE(stalled.size() == 1);
  CHECK(stalled[0].name == "asked");
}

TEST_CASE("a stall keeps its age when a hit becomes a side of a renegotiation") {
  Desk desk(3);
  const CacheId id = desk.agree(allreduce(0));
  desk.hit(0, id);
  desk.now += seconds(5);
  desk.request(allreduce(1, "x", {3}));
  const auto stalled = desk.coordinator.stalled(desk.now, seconds(1));
  REQUIRE(stalled.size() == 1);
  CHECK(stalled[0].age == seconds(5));
  CHECK(stalled[0].ready_ranks == std::vector<int>{0, 1});
}

// ---- many calls in random order -----------------------------------------------------
//
// N ranks with replicas of their own, joined by queues of encoded messages, submit
// a random program in random order while messages are delivered in random order.
// What must come of each operation is known from how the program was made.
//
// With joins, the program comes in epochs: in each, a rank takes part in the first rounds
// of every key, the same part of all, and then joins. (Were it more than another rank in
// one key and less in another, each would wait for the other to join.)

using Key = std::pair<ProcessSetId, std::string>;

struct Round {
  std::vector<Request> requests;  // by position
  bool agree = true;
  std::string refusal_start;
};

using Program = std::map<Key, std::vector<Round>>;

// Those that need no agreement beyond the ranks' own requests come first.
constexpr int kTensorKinds = static_cast<int>(OpKind::kJoin);

class Dice {
 public:
  explicit Dice(unsigned seed) : engine_(seed) {}
  int below(int n) { return static_cast<int>(engine_() % static_cast<unsigned>(n)); }
  bool chance(int percent) { return below(100) < percent; }

 private:
  std::mt19937 engine_;
};

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

// Makes one member's request disagree with the others' and says how it shows.
std::string spoil(Request& request, Dice& dice) {
  if (request.kind == OpKind::kBarrier || dice.chance(15)) {
    request.kind = request.kind == OpKind::kAllreduce ? OpKind::kBroadcast : OpKind::kAllreduce;
    return "Mismatched collective operations: ";
  }
  if (request.kind == OpKind::kAllreduce && dice.chance(30)) {
    if (dice.chance(50)) {
      request.op = request.op == ReduceOp::kMax ? ReduceOp::kMin : ReduceOp::kMax;
      return "Mismatched reduction operations: ";
    }
    request.scale.pre *= 2;
    return "Mismatched prescale and/or postscale factors: ";
  }
  if (request.kind == OpKind::kBroadcast && dice.chance(30)) {
    request.root += 1;
    return "Mismatched root ranks: ";
  }
  switch (dice.below(4)) {
    case 0:
      request.dtype = request.dtype == DType::kInt8 ? DType::kInt16 : DType::kInt8;
      return "Mismatched data types: ";
    case 1:
      request.device = DeviceKind::kCuda;
      return "Mismatched devices: ";
    case 2:
      request.shapes.push_back({1, 1});
      return "Mismatched numbers of tensors: ";
    default:
      request.shapes.back().back() += 1;
      return "Mismatched " + std::string(name_of(request.kind)) + " tensor shapes: ";
  }
}

std::vector<Round> random_rounds(const Key& key, std::span<const int> members, int count,
                                 bool spoils, Dice& dice) {
  Request base;
  base.process_set = key.first;
  base.name = key.second;
  base.kind = static_cast<OpKind>(dice.below(kTensorKinds));
  base.dtype = dice.chance(50) ? DType::kFloat32 : DType::kInt8;
  base.root = base.kind == OpKind::kBroadcast ? members[0] : -1;
  std::vector<std::int64_t> rows(members.size(), 1);
  std::vector<Round> rounds;
  for (int i = 0; i < count; ++i) {
    if (i == 0 || dice.chance(25)) {
      base.shapes.assign(static_cast<std::size_t>(1 + dice.below(2)), Shape{1, 1 + dice.below(3)});
    }
    Round& round = rounds.emplace_back();
    for (std::size_t m = 0; m < members.size(); ++m) {
      Request& request = round.requests.emplace_back(base);
      request.rank = members[m];
      request.priority = dice.below(3);
      request.where = std::to_string(dice.below(3));
      if (base.kind != OpKind::kAllgather) continue;
      if (dice.chance(30)) rows[m] = dice.below(4);
      for (Shape& shape : request.shapes) shape[0] = rows[m];
    }
    if (spoils && members.size() > 1 && dice.chance(15)) {
      round.agree = false;
      round.refusal_start = spoil(
          round.requests[static_cast<std::size_t>(dice.below(static_cast<int>(members.size())))],
          dice);
    }
  }
  return rounds;
}

struct Setting {
  int ranks = 1;
  bool tree = false;
  bool departure = false;
  std::size_t cache_capacity = 0;
  int joins = 0;
};

class World {
 public:
  World(const Setting& setting, unsigned seed)
      : setting_(setting), dice_(seed), sets_(setting.ranks) {
    const std::size_t bytes_max = static_cast<std::size_t>(dice_.below(40));
    coordinator_ = std::make_unique<Coordinator>(
        sets_, CoordinatorOptions{setting.cache_capacity, FusionPolicy{bytes_max}});
    make_sets_and_program();
    make_nodes();
    const int patience_ms[] = {0, 20, 1 << 30};
    patience_ = milliseconds(patience_ms[dice_.below(3)]);
  }

  void run() {
    for (int steps = 0; pending_results_ > 0; ++steps) {
      if (steps == 400000) throw std::runtime_error("left pending:" + text_of_pending());
      now_ += milliseconds(1);
      step(nodes_[static_cast<std::size_t>(dice_.below(setting_.ranks))], dice_.below(6));
    }
    drain();
    check_end();
  }

 private:
  struct Outstanding {
    const Request* request = nullptr;
    std::optional<CacheId> reported;
    std::size_t round = 0;
  };
  enum class Outcome { kNone, kRan, kRefused };
  struct Epoch {
    Program program;
    std::vector<int> percents;                                  // of the rounds, by rank
    std::map<Key, std::vector<std::size_t>> limits;             // rounds, by position
    std::map<Key, std::vector<std::vector<Outcome>>> outcomes;  // by round and position
  };
  struct Node {
    int rank = 0;
    int parent = -1;
    std::vector<int> children;
    std::vector<int> subtree;
    std::unique_ptr<Relay> relay;  // where there are children, and sometimes else
    ResponseCache cache;
    Report own;
    std::deque<std::string> to_parent;
    std::deque<std::string> decisions;
    std::map<Key, Outstanding> outstanding;
    std::map<Key, std::size_t> next_round;
    std::vector<std::string> log;
    bool departed = false;
    bool joining = false;
    std::size_t epoch = 0;
  };

  void make_sets_and_program() {
    for (int i = dice_.below(4); i > 0; --i) {
      std::vector<int> members;
      for (int rank = 0; rank < setting_.ranks; ++rank) {
        if (dice_.chance(60)) members.push_back(rank);
      }
      if (!members.empty()) sets_.add(std::move(members));
    }
    epochs_.resize(static_cast<std::size_t>(1 + setting_.joins));
    for (Epoch& epoch : epochs_) {
      for (int rank = 0; rank < setting_.ranks; ++rank) {
        epoch.percents.push_back(&epoch == &epochs_.back() ? 100 : dice_.below(101));
      }
      for (const ProcessSetId set : sets_.ids()) {
        for (int i = 1 + dice_.below(3); i > 0; --i) {
          make_rounds(epoch, {set, std::string(1, static_cast<char>('a' + i))});
        }
      }
    }
    pending_results_ += static_cast<std::size_t>(setting_.joins * setting_.ranks);
  }

  void make_rounds(Epoch& epoch, const Key& key) {
    const auto members = sets_.members(key.first);
    const int count = 1 + dice_.below(8);
    epoch.program[key] = random_rounds(key, members, count, setting_.joins == 0, dice_);
    for (const int member : members) {
      const int percent = epoch.percents[static_cast<std::size_t>(member)];
      const auto limit = static_cast<std::size_t>(count * percent / 100);
      epoch.limits[key].push_back(limit);
      pending_results_ += limit;
    }
    epoch.outcomes[key].assign(static_cast<std::size_t>(count),
                               std::vector<Outcome>(members.size(), Outcome::kNone));
  }

  void make_nodes() {
    nodes_.resize(static_cast<std::size_t>(setting_.ranks));
    for (int rank = setting_.ranks - 1; rank >= 0; --rank) {
      Node& node = at(rank);
      node.rank = rank;
      node.subtree.push_back(rank);
      std::sort(node.subtree.begin(), node.subtree.end());
      if (rank > 0) {
        node.parent = setting_.tree ? dice_.below(rank) : 0;
        Node& parent = at(node.parent);
        parent.children.push_back(rank);
        parent.subtree.insert(parent.subtree.end(), node.subtree.begin(), node.subtree.end());
      }
      if (setting_.tree && (!node.children.empty() || dice_.chance(50)) &&
          (rank > 0 || dice_.chance(50))) {
        node.relay = std::make_unique<Relay>(sets_, node.subtree);
      }
    }
  }

  Node& at(int rank) { return nodes_[static_cast<std::size_t>(rank)]; }

  // Whether anything was done.
  bool step(Node& node, int action) {
    switch (action) {
      case 0:
        return submit_next(node);
      case 1:
        return send_own(node);
      case 2:
        return deliver(node);
      case 3:
        return pass_on(node);
      case 4:
        return decide();
      default:
        return apply_next(node);
    }
  }

  bool submit_next(Node& node) {
    if (node.departed) return false;
    if (setting_.departure && !departed_ && node.rank == setting_.ranks - 1 && dice_.chance(2)) {
      depart(node);
      return true;
    }
    if (node.joining) return false;
    Epoch& epoch = epochs_[node.epoch];
    Program& program = epoch.program;
    auto entry = std::next(program.begin(), dice_.below(static_cast<int>(program.size())));
    const Key& key = entry->first;
    const auto position = sets_.position(key.first, node.rank);
    std::size_t& round = node.next_round[key];
    if (!position || node.outstanding.contains(key)) return false;
    if (round == epoch.limits[key][static_cast<std::size_t>(*position)]) return join(node);
    const Request& request = entry->second[round].requests[static_cast<std::size_t>(*position)];
    Outstanding& outstanding = node.outstanding[key];
    outstanding = {&request, node.cache.find(request, *position), round};
    ++round;
    if (!outstanding.reported) {
      node.own.requests.push_back(request);
    } else if (dice_.chance(50)) {
      node.own.subtree_hits.push_back(*outstanding.reported);
    } else {
      node.own.hits.push_back({node.rank, *outstanding.reported});
    }
    return true;
  }

  // Joins if there is nothing else to do. What is outstanding may still be.
  bool join(Node& node) {
    if (node.epoch + 1 == epochs_.size()) return false;
    for (const auto& [key, limits] : epochs_[node.epoch].limits) {
      const auto position = sets_.position(key.first, node.rank);
      if (position && node.next_round[key] != limits[static_cast<std::size_t>(*position)]) {
        return false;
      }
    }
    node.joining = true;
    Request& request = node.own.requests.emplace_back();
    request.rank = node.rank;
    request.kind = OpKind::kJoin;
    request.name = "join";
    return true;
  }

  void finish_join(Node& node) {
    expect(node.joining && node.outstanding.empty(), "a join before its operations");
    node.joining = false;
    node.next_round.clear();
    ++node.epoch;
    --pending_results_;
    if (node.relay) node.relay->end_join();
  }

  void depart(Node& node) {
    node.departed = true;
    departed_ = node.rank;
    node.own.departures.push_back({node.rank});
    for (const auto& [key, rounds] : epochs_[0].program) {
      if (sets_.position(key.first, node.rank)) {
        pending_results_ -= rounds.size() - node.next_round[key];
      }
    }
  }

  bool send_own(Node& node) {
    if (node.own.empty()) return false;
    const Report report = std::exchange(node.own, {});
    const Subtree from(sets_, {node.rank});
    if (node.relay) {
      node.relay->add(report, from, node.cache, now_);
    } else {
      send_up(node, report, from);
    }
    return true;
  }

  void send_up(Node& node, const Report& report, const Subtree& from) {
    if (node.parent < 0) {
      coordinator_->add(report, from, now_);
    } else {
      encode(report, node.to_parent.emplace_back());
    }
  }

  bool deliver(Node& node) {
    if (node.to_parent.empty()) return false;
    const Report report = decode_report(node.to_parent.front());
    node.to_parent.pop_front();
    Node& parent = at(node.parent);
    const Subtree from(sets_, node.subtree);
    if (parent.relay) {
      parent.relay->add(report, from, parent.cache, now_);
    } else {
      send_up(parent, report, from);
    }
    return true;
  }

  bool pass_on(Node& node) {
    if (!node.relay) return false;
    const Report report = node.relay->take_report(now_, patience_, patience_);
    if (report.empty()) return false;
    send_up(node, report, Subtree(sets_, node.subtree));
    return true;
  }

  bool decide() {
    if (!coordinator_->has_decision()) return false;
    const Decision decision = coordinator_->take_decision();
    expect(!decision.empty(), "has_decision, but there is none");
    encode(decision, at(0).decisions.emplace_back());
    return true;
  }

  bool apply_next(Node& node) {
    if (node.decisions.empty()) return false;
    const std::string payload = std::move(node.decisions.front());
    node.decisions.pop_front();
    apply(node, decode_decision(payload));
    for (const int child : node.children) at(child).decisions.push_back(payload);
    return true;
  }

  void apply(Node& node, const Decision& decision) {
    for (const Definition& definition : decision.definitions) node.cache.define(definition);
    for (const Resend& resend : decision.resends) resend_in_full(node, resend);
    for (const Refusal& refusal : decision.refusals) refuse(node, refusal);
    for (const Batch& batch : decision.batches) run_batch(node, batch);
    for (const CacheId id : decision.evictions) {
      node.cache.evict(id);
      if (node.relay) node.relay->withdraw(id);
    }
    expect(node.cache.size() <= setting_.cache_capacity, "the cache is over its capacity");
  }

  void resend_in_full(Node& node, const Resend& resend) {
    if (resend.rank != node.rank) return;
    node.own.answers.push_back(resend);
    for (auto& [key, outstanding] : node.outstanding) {
      if (outstanding.reported != resend.id) continue;
      outstanding.reported.reset();
      node.own.requests.push_back(*outstanding.request);
    }
  }

  void refuse(Node& node, const Refusal& refusal) {
    const bool is_departure = refusal.error.code == ErrorCode::kPeerDeparted;
    if (is_departure && node.relay) node.relay->doom(refusal.process_set);
    const auto found = node.outstanding.find({refusal.process_set, refusal.name});
    if (found == node.outstanding.end()) {
      expect(is_departure || node.joining || !sets_.position(refusal.process_set, node.rank),
             "a refusal of nothing");
      return;
    }
    const std::size_t round_number = found->second.round;
    const Round& round = epochs_[node.epoch].program.at(found->first)[round_number];
    if (is_departure) {
      expect(departed_ && sets_.position(refusal.process_set, *departed_), "nobody has departed");
    } else if (refusal.error.code == ErrorCode::kInvalidArgument) {
      expect(lacks_root(epochs_[node.epoch], found->first, round_number), "it has a root");
    } else {
      expect(refusal.error.message.starts_with(round.refusal_start) && !round.agree,
             "refused for no reason: " + refusal.error.message);
    }
    settle(node, found, Outcome::kRefused);
  }

  void run_batch(Node& node, const Batch& batch) {
    std::string line;
    for (const CacheId id : batch.ids) {
      const Agreement* agreement = node.cache.get(id);
      expect(agreement != nullptr, "a batch of an unknown id");
      line += std::to_string(id) + "=" + agreement->name + "@" +
              std::to_string(agreement->process_set) + ":" + std::to_string(agreement->root) + " ";
      if (agreement->kind == OpKind::kJoin) {
        finish_join(node);
        continue;
      }
      const auto position = sets_.position(agreement->process_set, node.rank);
      if (!position) continue;
      const auto found = node.outstanding.find({agreement->process_set, agreement->name});
      if (found == node.outstanding.end()) {
        expect(node.joining, "a batch of what was not asked for");
        continue;
      }
      check_agreement(*agreement, found->second, epochs_[node.epoch], found->first, *position);
      settle(node, found, Outcome::kRan);
    }
    node.log.push_back(line);
  }

  static void check_agreement(const Agreement& agreement, const Outstanding& outstanding,
                              const Epoch& epoch, const Key& key, int position) {
    const Round& round = epoch.program.at(key)[outstanding.round];
    const std::vector<std::size_t>& limits = epoch.limits.at(key);
    expect(round.agree, "ran in spite of a disagreement");
    expect(satisfies(agreement, *outstanding.request, position), "ran something else");
    if (agreement.kind != OpKind::kAllgather) return;
    std::vector<std::int64_t> rows;
    std::int64_t sum = 0;
    for (std::size_t m = 0; m < limits.size(); ++m) {
      const bool takes_part = outstanding.round < limits[m];
      const std::vector<Shape>& shapes = round.requests[m].shapes;
      for (const Shape& shape : shapes) rows.push_back(takes_part ? shape[0] : 0);
      sum += takes_part ? shapes[0][0] : 0;
    }
    expect(agreement.rows == rows, "wrong rows");
    expect(agreement.shapes[0][0] == sum, "wrong sum of rows");
  }

  void settle(Node& node, std::map<Key, Outstanding>::iterator found, Outcome outcome) {
    const auto position = sets_.position(found->first.first, node.rank);
    Outcome& place =
        epochs_[node.epoch]
            .outcomes[found->first][found->second.round][static_cast<std::size_t>(*position)];
    expect(place == Outcome::kNone, "settled twice");
    place = outcome;
    --pending_results_;
    node.outstanding.erase(found);
  }

  std::string text_of_pending() const {
    std::string text;
    for (const Node& node : nodes_) {
      text += " rank " + std::to_string(node.rank) + " in epoch " + std::to_string(node.epoch);
      if (node.joining) text += " has joined";
      for (const auto& [key, outstanding] : node.outstanding) {
        text += " waits for " + key.second + "@" + std::to_string(key.first) + "." +
                std::to_string(outstanding.round);
      }
      text += ";";
    }
    return text;
  }

  void drain() {
    for (bool busy = true; busy;) {
      busy = false;
      now_ += std::chrono::hours(1000);
      for (Node& node : nodes_) {
        for (int action = 1; action < 6; ++action) busy |= step(node, action);
      }
    }
  }

  void check_end() {
    expect(coordinator_->stalled(now_, seconds(0)).empty(), "something is left at the coordinator");
    for (const Node& node : nodes_) {
      expect(node.outstanding.empty(), "something is left at a rank");
      expect(node.log == nodes_[0].log, "ranks ran different batches");
      expect(node.cache.size() == nodes_[0].cache.size(), "replicas differ");
    }
    for (const Epoch& epoch : epochs_) {
      for (const auto& [key, rounds] : epoch.program) check_outcomes(epoch, key, rounds);
    }
  }

  void check_outcomes(const Epoch& epoch, const Key& key, const std::vector<Round>& rounds) {
    const bool doomed = departed_ && sets_.position(key.first, *departed_);
    for (std::size_t i = 0; i < rounds.size(); ++i) {
      const std::vector<Outcome>& outcomes = epoch.outcomes.at(key)[i];
      const auto asked =
          std::ranges::count_if(epoch.limits.at(key), [i](std::size_t limit) { return i < limit; });
      const auto ran = std::ranges::count(outcomes, Outcome::kRan);
      expect(ran == asked || ran == 0, "ran on some members only");
      const bool runs = rounds[i].agree && !lacks_root(epoch, key, i);
      if (!doomed && asked > 0) expect((ran == asked) == runs, "not what the program asked for");
    }
  }

  // Whether the root of a broadcast has joined before this round.
  bool lacks_root(const Epoch& epoch, const Key& key, std::size_t round) const {
    const Request& request = epoch.program.at(key)[round].requests[0];
    if (request.kind != OpKind::kBroadcast) return false;
    const auto root = sets_.position(key.first, request.root);
    return root && round >= epoch.limits.at(key)[static_cast<std::size_t>(*root)];
  }

  const Setting setting_;
  Dice dice_;
  ProcessSets sets_;
  std::unique_ptr<Coordinator> coordinator_;
  std::vector<Epoch> epochs_;
  std::vector<Node> nodes_;
  std::size_t pending_results_ = 0;
  std::optional<int> departed_;
  Time now_{};
  std::chrono::duration<double> patience_{};
};

void run_worlds(int ranks_max, bool tree, bool departure, int count, int joins = 0) {
  for (int i = 0; i < count; ++i) {
    for (const std::size_t capacity : {0u, 1u, 3u, 100u}) {
      const auto seed = static_cast<unsigned>(i * 1000 + static_cast<int>(capacity));
      const Setting setting{1 + i % ranks_max, tree, departure, capacity, joins};
      CAPTURE(seed);
      CAPTURE(setting.ranks);
      std::string error;
      try {
        World(setting, seed).run();
      } catch (const std::exception& caught) {
        error = caught.what();
      }
      REQUIRE(error == "");
    }
  }
}

TEST_CASE("random programs: every operation runs on all members or is refused on all") {
  run_worlds(5, false, false, 150);
}

TEST_CASE("random programs through a tree of relays") { run_worlds(8, true, false, 200); }

TEST_CASE("random programs in which ranks run out and join, flat and through a tree") {
  run_worlds(5, false, false, 150, 2);
  run_worlds(8, true, false, 200, 2);
}

TEST_CASE("random programs with a departure, flat and through a tree") {
  run_worlds(5, false, true, 100);
  run_worlds(8, true, true, 200);
}

}  // namespace
}  // namespace polyhvd
