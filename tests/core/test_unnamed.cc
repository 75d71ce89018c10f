// Calls without names: the n-th that a rank submits belongs to the n-th of the others.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <random>
#include <string>
#include <vector>

#include "control/coordinator.h"
#include "control/relay.h"
#include "thread_world.h"

namespace polyhvd {
namespace {

using std::chrono::seconds;
using test::Layout;
using test::one_host;
using test::ThreadWorld;

// ---- the coordinator, one call after the other ------------------------------------

Request unnamed(int rank, Turn turn, Shape shape = {4}, OpKind kind = OpKind::kAllreduce) {
  Request request;
  request.rank = rank;
  request.kind = kind;
  request.turn = turn;
  request.name = TurnName(kind, turn).text();
  request.shapes = {std::move(shape)};
  request.where = std::string("train.py:91");
  return request;
}

class Desk {
 public:
  explicit Desk(int size, std::size_t capacity = 1024)
      : sets(size), coordinator(sets, {capacity, {}}) {}

  void request(const Request& request) { add({.requests = {request}}, {request.rank}); }
  void hit(int rank, CacheId id, Turn turn) { add({.subtree_turns = {{0, id, turn}}}, {rank}); }
  void add(const Report& report, const std::vector<int>& from) {
    coordinator.add(report, Subtree(sets, from), now);
  }
  Decision take() { return coordinator.take_decision(); }
  // Has all ranks make the same call, and returns the id of its template.
  CacheId agree(Turn turn, const Shape& shape = {4}) {
    for (int rank = 0; rank < sets.world_size(); ++rank) request(unnamed(rank, turn, shape));
    const Decision decision = take();
    REQUIRE(decision.batches.size() == 1);
    CHECK(decision.batches[0].turns == std::vector<Turn>{turn});
    return decision.batches[0].ids[0];
  }

  ProcessSets sets;
  Coordinator coordinator;
  Time now{};
};

TEST_CASE("calls that ask for the same share a template, whatever their turns") {
  Desk desk(2);
  const CacheId id = desk.agree(1);
  CHECK(desk.agree(2) == id);
  CHECK(desk.agree(3, {5}) != id);
  for (const Turn turn : {4, 5}) desk.hit(0, id, turn);
  CHECK_FALSE(desk.coordinator.has_decision());
  for (const Turn turn : {5, 4}) desk.hit(1, id, turn);
  const Decision decision = desk.take();
  CHECK(decision.definitions.empty());
  REQUIRE(decision.batches.size() == 1);
  CHECK(decision.batches[0].ids == std::vector<CacheId>{id, id});
  CHECK(decision.batches[0].turns == std::vector<Turn>{5, 4});
}

TEST_CASE("a call in full and a hit of the same turn meet, whichever comes first") {
  for (const bool hit_first : {true, false}) {
    Desk desk(2);
    const CacheId id = desk.agree(1);
    if (hit_first) desk.hit(0, id, 2);
    desk.request(unnamed(1, 2));
    if (!hit_first) desk.hit(0, id, 2);
    const Decision decision = desk.take();
    CHECK(decision.definitions.empty());
    REQUIRE(decision.batches.size() == 1);
    CHECK(decision.batches[0].ids == std::vector<CacheId>{id});
    CHECK(decision.batches[0].turns == std::vector<Turn>{2});
  }
}

TEST_CASE("turns that name other templates are a mismatch, and the next turns go on") {
  Desk desk(3);
  const CacheId four = desk.agree(1, {4});
  const CacheId five = desk.agree(2, {5});
  desk.hit(0, four, 3);
  desk.hit(1, five, 3);
  for (const int rank : {0, 1, 2}) desk.hit(rank, four, 4);
  CHECK(desk.take().batches.size() == 1);
  desk.hit(2, four, 3);
  const Decision decision = desk.take();
  CHECK(decision.batches.empty());
  REQUIRE(decision.refusals.size() == 1);
  const Refusal& refusal = decision.refusals[0];
  CHECK(refusal.name == "allreduce.noname.2");
  CHECK(refusal.turn == 3);
  CHECK(refusal.error.code == ErrorCode::kRankMismatch);
  CHECK(refusal.error.message.find("rank 1 sent float32 [5]") != std::string::npos);
  CHECK(refusal.error.message.find("ranks 0, 2 sent float32 [4]") != std::string::npos);
}

TEST_CASE("a hit of an evicted template is asked for again, with its turn") {
  Desk desk(2, 1);
  const CacheId four = desk.agree(1, {4});
  desk.agree(2, {5});
  desk.hit(0, four, 3);
  const Decision decision = desk.take();
  REQUIRE(decision.resends.size() == 1);
  CHECK(decision.resends[0].id == four);
  CHECK(decision.resends[0].turn == 3);
  desk.add({.requests = {unnamed(0, 3)}, .answers = {decision.resends[0]}}, {0});
  desk.request(unnamed(1, 3));
  CHECK(desk.take().batches.size() == 1);
}

TEST_CASE("a template that somebody waits for is not evicted") {
  Desk desk(2, 1);
  const CacheId four = desk.agree(1, {4});
  desk.hit(0, four, 2);
  desk.agree(3, {5});
  desk.hit(1, four, 2);
  const Decision decision = desk.take();
  REQUIRE(decision.batches.size() == 1);
  CHECK(decision.batches[0].ids == std::vector<CacheId>{four});
}

TEST_CASE("rows that are never the same fill the cache with a few templates only") {
  Desk desk(2);
  std::size_t known = 0;
  for (Turn turn = 1; turn <= 100; ++turn) {
    for (const int rank : {0, 1}) {
      const auto rows = static_cast<std::int64_t>(turn) + rank;
      desk.request(unnamed(rank, turn, {rows, 2}, OpKind::kAllgather));
    }
    const Decision decision = desk.take();
    known += decision.definitions.size() - decision.evictions.size();
  }
  CHECK(known <= 16);
}

TEST_CASE("a rank that has joined or left counts for unnamed calls, too") {
  Desk desk(2);
  const CacheId id = desk.agree(1);
  desk.hit(0, id, 2);
  desk.request(unnamed(1, 1, {}, OpKind::kJoin));
  desk.hit(0, id, 3);
  Decision decision = desk.take();
  REQUIRE(decision.batches.size() == 1);
  CHECK(decision.batches[0].turns == std::vector<Turn>{2, 3});
  desk.request(unnamed(0, 1, {}, OpKind::kJoin));
  CHECK(desk.take().batches.size() == 1);
  desk.hit(0, id, 4);
  desk.add({.departures = {{1}}}, {1});
  desk.hit(0, id, 5);
  decision = desk.take();
  REQUIRE(decision.refusals.size() == 2);
  CHECK(decision.refusals[0].turn == 4);
  CHECK(decision.refusals[1].name == "allreduce.noname.4");
}

TEST_CASE("unnamed calls that wait are reported as stalled") {
  Desk desk(3);
  const CacheId id = desk.agree(1);
  desk.hit(2, id, 2);
  const auto stalled = desk.coordinator.stalled(desk.now + seconds(5), seconds(1));
  REQUIRE(stalled.size() == 1);
  CHECK(stalled[0].name == "allreduce.noname.1");
  CHECK(stalled[0].absent_ranks == std::vector<int>{0, 1});
  CHECK(stalled[0].where.empty());
}

// ---- a relay ----------------------------------------------------------------------

class Node {
 public:
  Node() : sets(6), relay(sets, {2, 3, 4}) {
    for (const CacheId id : {1, 2}) {
      Definition definition;
      definition.id = id;
      definition.agreement.shapes = {{id}};
      cache.define(std::move(definition));
    }
  }
  void hit(int rank, CacheId id, Turn turn) { add({.subtree_turns = {{0, id, turn}}}, {rank}); }
  void add(const Report& report, const std::vector<int>& from) {
    relay.add(report, Subtree(sets, from), cache, now);
  }
  Report take() { return relay.take_report(now, seconds(10), seconds(10)); }

  ProcessSets sets;
  ResponseCache cache;
  Relay relay;
  Time now{};
};

TEST_CASE("a relay sends a turn up once, when the whole subtree has it") {
  Node node;
  for (const Turn turn : {1, 2, 3}) {
    node.hit(3, 1, turn);
    node.hit(2, 1, turn);
    CHECK(node.take().empty());
    node.hit(4, 1, turn);
    const Report report = node.take();
    REQUIRE(report.subtree_turns.size() == 1);
    CHECK(report.subtree_turns[0].turn == turn);
    CHECK(report.turns.empty());
    node.relay.end_turn({kWorld, OpKind::kAllreduce, turn});
  }
}

TEST_CASE("a relay holds nothing of a turn that is asked for in full or under two ids") {
  Node node;
  node.hit(2, 1, 1);
  node.add({.requests = {unnamed(3, 1)}}, {3});
  Report report = node.take();
  CHECK(report.turns.size() == 1);
  CHECK(report.requests.size() == 1);
  node.hit(4, 1, 1);
  CHECK(node.take().turns.size() == 1);
  node.hit(2, 1, 2);
  node.hit(3, 2, 2);
  CHECK(node.take().turns.size() == 2);
  node.hit(4, 1, 2);
  CHECK(node.take().turns.size() == 1);
}

TEST_CASE("a relay lets go of turns after its patience, and when their template goes") {
  Node node;
  node.hit(2, 1, 1);
  node.now += seconds(11);
  CHECK(node.take().turns.size() == 1);
  node.hit(2, 1, 2);
  CHECK(node.take().empty());
  node.relay.withdraw(1);
  CHECK(node.take().turns.size() == 1);
}

// ---- engines ----------------------------------------------------------------------

Submission without_name(std::vector<float>& values, ReduceOp op = ReduceOp::kSum,
                        ProcessSetId set = kWorld) {
  Submission s = test::allreduce("", values, op, set);
  leave_unnamed(s);
  return s;
}

TEST_CASE(
    "unnamed calls pair by submission over any layout, in whatever order they are waited for") {
  for (const Layout& layout :
       {one_host(2), Layout{{0}, {1}, {2}}, Layout{{0, 1}, {2, 3}, {4, 5}}}) {
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      std::mt19937 random(static_cast<unsigned>(rank));
      for (int step = 0; step < 5; ++step) {
        std::vector<std::vector<float>> tensors;
        for (std::size_t i = 0; i < 40; ++i) {
          tensors.emplace_back(1 + i % 3,
                               static_cast<float>((rank + 1) * (static_cast<int>(i) + 1)));
        }
        std::vector<OperationPtr> operations;
        for (auto& tensor : tensors) operations.push_back(engine.submit(without_name(tensor)));
        std::vector<std::size_t> order(operations.size());
        for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), random);
        const int all = world.size() * (world.size() + 1) / 2;
        for (const std::size_t i : order) {
          engine.wait(operations[i]);
          const auto sum = static_cast<float>(all * (static_cast<int>(i) + 1));
          wrong += tensors[i] != std::vector<float>(1 + i % 3, sum);
        }
      }
    });
    CHECK(wrong == 0);
    CHECK(world.engine(0).counters().at("cache_hits") >= 4 * 40);
    world.shutdown();
  }
}

TEST_CASE("four threads of each rank with the same unnamed calls all get the sum") {
  for (const Layout& layout : {one_host(3), Layout{{0}, {1, 2}}}) {
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      std::vector<std::thread> threads;
      for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([&] {
          for (int step = 0; step < 25; ++step) {
            std::vector<float> tensor(10, static_cast<float>(rank + 1));
            engine.wait(engine.submit(without_name(tensor), true));
            wrong += tensor != std::vector<float>(10, 6.0f);
          }
        });
      }
      for (std::thread& thread : threads) thread.join();
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

TEST_CASE("ranks whose unnamed calls differ all get the error, and those around it are right") {
  for (const Layout& layout : {one_host(2), Layout{{0, 1}, {2, 3}, {4}}}) {
    ThreadWorld world(layout);
    std::atomic<int> mismatches{0}, wrong{0};
    world.run([&](int rank, Engine& engine) {
      for (int step = 0; step < 3; ++step) {
        std::vector<float> before(4, 1.0f), bad(rank == world.size() - 1 ? 5 : 4, 1.0f),
            after(4, 2.0f);
        const auto first = engine.submit(without_name(before));
        const auto odd = engine.submit(without_name(bad));
        const auto last = engine.submit(without_name(after));
        engine.wait(last);
        engine.wait(first);
        wrong += before[0] != static_cast<float>(world.size());
        wrong += after[0] != static_cast<float>(2 * world.size());
        try {
          engine.wait(odd);
        } catch (const Failure& failure) {
          mismatches += failure.error().code == ErrorCode::kRankMismatch;
        }
      }
    });
    CHECK(wrong == 0);
    CHECK(mismatches == 3 * world.size());
    world.shutdown();
  }
}

TEST_CASE("a rank that has joined counts the calls that it has stood in for") {
  for (const Layout& layout : {one_host(2), Layout{{0}, {1}, {2}}}) {
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    const auto join = [](Engine& engine) {
      Submission s;
      s.kind = OpKind::kJoin;
      leave_unnamed(s);
      engine.wait(engine.submit(std::move(s)));
    };
    world.run([&](int rank, Engine& engine) {
      for (int round = 0; round < 3; ++round) {
        for (int step = 0; step < 2 + 3 * rank; ++step) {
          std::vector<float> tensor(4, 1.0f);
          engine.wait(engine.submit(without_name(tensor)));
        }
        join(engine);
        std::vector<float> x(4, static_cast<float>(rank)), y(6, 1.0f);
        const auto first = engine.submit(without_name(x));
        engine.wait(engine.submit(without_name(y)));
        engine.wait(first);
        wrong += x[0] != static_cast<float>(world.size() * (world.size() - 1) / 2);
        wrong += y[0] != static_cast<float>(world.size());
      }
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

TEST_CASE("a call that is refused at submit takes no turn") {
  ThreadWorld world(one_host(2));
  std::atomic<int> wrong{0};
  world.run([&](int rank, Engine& engine) {
    if (rank == 1) {
      std::vector<float> tensor(4);
      Submission s = without_name(tensor);
      s.process_set = 7;
      CHECK_THROWS_AS(engine.submit(std::move(s)), Failure);
    }
    std::vector<float> tensor(4, 1.0f);
    engine.wait(engine.submit(without_name(tensor)));
    wrong += tensor[0] != 2.0f;
  });
  CHECK(wrong == 0);
  world.shutdown();
}

TEST_CASE("a turn that was taken before may be submitted after later ones") {
  ThreadWorld world(one_host(2));
  std::atomic<int> wrong{0};
  world.run([&](int rank, Engine& engine) {
    std::vector<std::vector<float>> tensors;
    std::vector<Turn> turns;
    for (int i = 0; i < 6; ++i) {
      tensors.emplace_back(4, static_cast<float>(i));
      turns.push_back(engine.take_turn(kWorld, OpKind::kAllreduce));
    }
    std::vector<OperationPtr> operations;
    for (int i = 0; i < 6; ++i) {
      const auto k = static_cast<std::size_t>(rank == 0 ? i : 5 - i);
      Submission s = test::allreduce(TurnName(OpKind::kAllreduce, turns[k]).text(), tensors[k]);
      s.turn = turns[k];
      operations.push_back(engine.submit(std::move(s)));
    }
    for (const OperationPtr& operation : operations) engine.wait(operation);
    for (std::size_t i = 0; i < 6; ++i) wrong += tensors[i][0] != static_cast<float>(2 * i);
  });
  CHECK(wrong == 0);
  world.shutdown();
}

TEST_CASE("an operation that is given the very name of an unnamed call does not disturb it") {
  ThreadWorld world(one_host(2));
  std::atomic<int> wrong{0};
  world.run([&](int, Engine& engine) {
    std::vector<float> named(4, 1.0f), call(4, 3.0f);
    const auto first = engine.submit(test::allreduce("allreduce.noname.0", named));
    engine.wait(engine.submit(without_name(call)));
    engine.wait(first);
    wrong += named[0] != 2.0f;
    wrong += call[0] != 6.0f;
  });
  CHECK(wrong == 0);
  world.shutdown();
}

}  // namespace
}  // namespace polyhvd
