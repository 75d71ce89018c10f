#include <doctest/doctest.h>

#include "control/relay.h"

namespace polyhvd {
namespace {

using std::chrono::seconds;

// A relay for ranks 2, 3 and 4 of a world of 6, with x known as id 1 and, in the
// set of 0, 3 and 4, y as id 2.
class Node {
 public:
  Node() : sets(6), relay(sets, {2, 3, 4}) {
    set = sets.add({0, 3, 4});
    define(1, kWorld, "x");
    define(2, set, "y");
  }
  void define(CacheId id, ProcessSetId process_set, const char* name) {
    Definition definition;
    definition.id = id;
    definition.agreement.process_set = process_set;
    definition.agreement.name = std::string(name);
    cache.define(std::move(definition));
  }
  void hit(int rank, CacheId id) { add({.hits = {{rank, id}}}, {rank}); }
  void subtree_hit(const std::vector<int>& ranks, CacheId id) {
    add({.subtree_hits = {id}}, ranks);
  }
  void depart(int rank, const std::string& words = {}) {
    add({.departures = {{rank, words}}}, {rank});
  }
  void request(int rank, ProcessSetId process_set, const char* name, int priority = 0,
               OpKind kind = OpKind::kAllreduce) {
    Request request;
    request.rank = rank;
    request.process_set = process_set;
    request.name = std::string(name);
    request.priority = priority;
    request.kind = kind;
    add({.requests = {request}}, {rank});
  }
  void subtree_request(const std::vector<int>& ranks, ProcessSetId process_set, const char* name) {
    Request request;
    request.rank = ranks.front();
    request.process_set = process_set;
    request.name = std::string(name);
    add({.subtree_requests = {request}}, ranks);
  }
  void add(const Report& report, const std::vector<int>& from) {
    relay.add(report, Subtree(sets, from), cache, now);
  }
  Report take() { return relay.take_report(now, seconds(10), seconds(10)); }

  ProcessSets sets;
  ResponseCache cache;
  Relay relay;
  ProcessSetId set = 0;
  Time now{};
};

using Hits = std::vector<std::pair<int, CacheId>>;

Hits hits_of(const Report& report) {
  Hits hits;
  for (const Report::Hit& hit : report.hits) hits.emplace_back(hit.rank, hit.id);
  return hits;
}

TEST_CASE("a hit goes up once, when the whole subtree has it") {
  Node node;
  for (int step = 0; step < 3; ++step) {
    node.hit(3, 1);
    node.subtree_hit({4}, 1);
    CHECK(node.take().empty());
    node.hit(2, 1);
    const Report report = node.take();
    CHECK(report.subtree_hits == std::vector<CacheId>{1});
    CHECK(report.hits.empty());
    CHECK(node.take().empty());
  }
}

TEST_CASE("members outside the subtree and others within it are not waited for") {
  Node node;
  node.hit(4, 2);
  CHECK(node.take().empty());
  node.hit(3, 2);
  CHECK(node.take().subtree_hits == std::vector<CacheId>{2});
}

TEST_CASE("a child's subtree hit speaks for its members of the set alone") {
  Node node;
  node.subtree_hit({2, 3}, 2);
  CHECK(node.take().empty());
  node.subtree_hit({4}, 2);
  CHECK(node.take().subtree_hits == std::vector<CacheId>{2});
}

TEST_CASE("a departure goes up at once, with its last words") {
  Node node;
  node.depart(2, "ValueError: bad row");
  CHECK(node.take().departures == std::vector<Departure>{{2, "ValueError: bad row"}});
}

std::vector<int> ranks_of(const std::vector<Request>& requests) {
  std::vector<int> ranks;
  for (const Request& request : requests) ranks.push_back(request.rank);
  return ranks;
}

TEST_CASE("a new name goes up once, when the whole subtree has asked for it") {
  Node node;
  node.request(3, kWorld, "new");
  node.subtree_request({2}, kWorld, "new");
  CHECK(node.take().empty());
  node.request(4, kWorld, "new");
  const Report report = node.take();
  REQUIRE(report.subtree_requests.size() == 1);
  CHECK(report.subtree_requests[0].name == "new");
  CHECK(report.requests.empty());
  node.request(3, kWorld, "new");  // evicted since
  CHECK(ranks_of(node.take().requests) == std::vector<int>{3});
}

TEST_CASE("a new name of a set waits for the set's members below alone") {
  Node node;
  node.subtree_request({2, 3}, node.set, "new");
  CHECK(node.take().empty());
  node.request(4, node.set, "new");
  CHECK(node.take().subtree_requests.size() == 1);
}

TEST_CASE("ranks that ask otherwise go up one by one, with what was held") {
  Node node;
  node.subtree_request({2, 3}, kWorld, "new");
  node.request(4, kWorld, "new", 5);
  const Report report = node.take();
  CHECK(ranks_of(report.requests) == std::vector<int>{2, 3, 4});
  CHECK(report.requests[2].priority == 5);
  CHECK(report.subtree_requests.empty());
}

TEST_CASE("after its patience a relay sends the requests that it has, and the rest as they come") {
  Node node;
  node.request(3, kWorld, "new");
  node.now += seconds(9);
  CHECK(node.take().empty());
  node.now += seconds(1);
  CHECK(ranks_of(node.take().requests) == std::vector<int>{3});
  node.request(2, kWorld, "new");
  CHECK(ranks_of(node.take().requests) == std::vector<int>{2});
  node.subtree_request({4}, kWorld, "new");
  CHECK(ranks_of(node.take().requests) == std::vector<int>{4});
}

TEST_CASE("requests that are held go up before a join, a departure and the end of their set") {
  Node joined;
  joined.request(3, kWorld, "new");
  joined.request(3, kWorld, "join", 0, OpKind::kJoin);
  Report report = joined.take();
  REQUIRE(report.requests.size() == 2);
  CHECK(report.requests[0].name == "new");
  joined.request(2, kWorld, "new");
  CHECK(ranks_of(joined.take().requests) == std::vector<int>{2});

  Node left;
  left.request(3, left.set, "new");
  left.depart(4);
  CHECK(ranks_of(left.take().requests) == std::vector<int>{3});

  Node removed;
  removed.request(3, removed.set, "new");
  removed.sets.remove(removed.set);
  removed.relay.remove(removed.set);
  CHECK(ranks_of(removed.take().requests) == std::vector<int>{3});
  removed.request(4, removed.set, "new");
  CHECK(ranks_of(removed.take().requests) == std::vector<int>{4});
}

TEST_CASE("hits of an id that the replica does not know go up as they are") {
  Node node;
  node.hit(3, 77);
  node.subtree_hit({2, 4}, 77);
  CHECK(hits_of(node.take()) == Hits{{3, 77}, {2, 77}, {4, 77}});
}

TEST_CASE("after its patience a relay sends what it has, once, and the rest as it comes") {
  Node node;
  node.hit(3, 1);
  node.now += seconds(9);
  CHECK(node.take().empty());
  node.now += seconds(1);
  CHECK(hits_of(node.take()) == Hits{{3, 1}});
  CHECK(node.take().empty());
  node.hit(2, 1);
  CHECK(hits_of(node.take()) == Hits{{2, 1}});
  node.hit(4, 1);
  CHECK(hits_of(node.take()) == Hits{{4, 1}});
  node.subtree_hit({2, 3, 4}, 1);  // the next round is merged again
  CHECK(node.take().subtree_hits == std::vector<CacheId>{1});
}

TEST_CASE("patience counts from the first hit of a round, for each id") {
  Node node;
  node.hit(3, 1);
  node.hit(2, 1);
  node.hit(4, 1);
  node.take();
  node.now += seconds(60);
  node.hit(3, 1);
  node.now += seconds(5);
  node.hit(3, 2);
  CHECK(node.take().empty());
  node.now += seconds(5);
  CHECK(hits_of(node.take()) == Hits{{3, 1}});
  node.now += seconds(5);
  CHECK(hits_of(node.take()) == Hits{{3, 2}});
}

TEST_CASE("a request for a cached name sends the hits held back, and later ones at once") {
  Node node;
  node.hit(3, 1);
  node.request(2, kWorld, "x");
  Report report = node.take();
  CHECK(hits_of(report) == Hits{{3, 1}});
  CHECK(report.requests.size() == 1);
  node.hit(4, 1);
  CHECK(hits_of(node.take()) == Hits{{4, 1}});
  node.subtree_hit({2, 3, 4}, 1);
  CHECK(node.take().subtree_hits == std::vector<CacheId>{1});
}

TEST_CASE("a request before any hit makes the hits follow at once") {
  Node node;
  node.request(3, node.set, "y");
  node.hit(4, 2);
  CHECK(hits_of(node.take()) == Hits{{4, 2}});
  node.hit(4, 2);
  CHECK(node.take().empty());
}

TEST_CASE("a request for the same name in another set changes nothing") {
  Node node;
  node.hit(3, 1);
  node.request(3, node.set, "x");
  CHECK(node.take().hits.empty());
}

TEST_CASE("a withdrawn id's hits go up, and so do those that come after its eviction") {
  Node node;
  node.hit(3, 1);
  node.cache.evict(1);
  node.relay.withdraw(1);
  CHECK(hits_of(node.take()) == Hits{{3, 1}});
  node.hit(2, 1);
  CHECK(hits_of(node.take()) == Hits{{2, 1}});
  node.relay.withdraw(1);
  node.relay.withdraw(99);
  CHECK(node.take().empty());
}

TEST_CASE("hits that went up already do not go up again when withdrawn") {
  Node node;
  node.hit(3, 1);
  node.now += seconds(10);
  node.take();
  node.relay.withdraw(1);
  CHECK(node.take().empty());
}

TEST_CASE("a departure releases the hits that would wait for it, and later ones") {
  Node node;
  node.hit(3, 1);
  node.hit(3, 2);
  node.depart(2);  // of the world, not of the set
  CHECK(hits_of(node.take()) == Hits{{3, 1}});
  node.hit(4, 1);
  CHECK(hits_of(node.take()) == Hits{{4, 1}});
  node.hit(4, 2);
  CHECK(node.take().subtree_hits == std::vector<CacheId>{2});
}

TEST_CASE("a doomed set's hits are held back no longer") {
  Node node;
  node.hit(3, 2);
  node.hit(3, 1);
  node.relay.doom(node.set);
  CHECK(hits_of(node.take()) == Hits{{3, 2}});
  node.hit(3, 2);
  node.hit(4, 2);
  CHECK(hits_of(node.take()) == Hits{{3, 2}, {4, 2}});
}

TEST_CASE("a rank's second hit, its first refused above, ends the merging of that round") {
  Node node;
  node.hit(3, 1);
  node.hit(3, 1);
  CHECK(hits_of(node.take()) == Hits{{3, 1}, {3, 1}});
}

TEST_CASE("a rank's request, its hit refused above, starts a round that is passed on") {
  Node node;
  node.hit(3, 2);
  node.request(3, node.set, "y");
  CHECK(hits_of(node.take()) == Hits{{3, 2}});
  node.hit(4, 2);
  CHECK(hits_of(node.take()) == Hits{{4, 2}});
  node.hit(4, 2);
  CHECK(node.take().empty());
}

TEST_CASE("a hit from outside the process set breaks the protocol") {
  Node node;
  CHECK_THROWS_AS(node.hit(2, 2), Failure);
  CHECK_THROWS_AS(node.subtree_hit({2}, 2), Failure);
  CHECK_THROWS_AS(node.request(2, node.set, "y"), Failure);
}

}  // namespace
}  // namespace polyhvd
