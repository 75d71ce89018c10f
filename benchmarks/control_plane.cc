// What agreement costs in large jobs: the real coordinator, relays and wire format, over
// an in-memory transport, for 2 to 16384 ranks (8 to a host) and 1000 tensors a step. Beside it a
// flat coordinator, to which every rank reports by itself. Prints a table in Markdown.
//
//   make control-plane            (or build/core/plain/control_plane [ranks at most] [tensors])
//
// "uncached": the first step, where every rank sends every request in full; in large
// worlds some tensors after the others, as backward makes them, and for want of memory.
// "cached": a later one, where it sends numbers. Bytes and messages are counted, CPU time is
// measured around each node's own work; "path" adds up the slowest node of each level, there and
// back, and is what a step waits for beside the network. Ranks' caches are replicas, so all
// nodes share one here.
#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "control/coordinator.h"
#include "control/relay.h"
#include "control/wire.h"
#include "world.h"

namespace {

using namespace polyhvd;

constexpr int kRanksPerHost = 8;
constexpr int kRounds = 5;
constexpr std::chrono::seconds kPatience{1};
constexpr int kRequestsAtOnce = 2'000'000;  // of all ranks

// Of this thread's CPU, so that other programs do not count.
double now_s() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

struct Node {
  int rank = 0;
  int level = 0;
  std::vector<std::size_t> children;  // indices of nodes
  std::vector<int> ranks;             // at and below it
  std::optional<Subtree> subtree;     // the same
  std::unique_ptr<Relay> relay;       // of inner nodes but the root
  std::string payload;                // what it sends up
  double up_s = 0;
  double down_s = 0;
};

// Of one step.
struct Cost {
  std::int64_t root_messages = 0;
  std::int64_t root_bytes = 0;
  std::int64_t most_messages = 0;  // of any node
  double root_s = 0;
  double path_s = 0;
};

class Simulation {
 public:
  Simulation(int ranks, int tensors, bool flat)
      : tensors_(tensors), sets_(ranks), coordinator_(sets_, options_for(tensors)) {
    for (int rank = 0; rank < ranks; ++rank)
      nodes_.push_back({rank, 0, {}, {rank}, {}, nullptr, {}});
    for (int rank = 1; rank < ranks; ++rank) {
      nodes_[parent_of(rank, flat)].children.push_back(static_cast<std::size_t>(rank));
    }
    set_levels(0, 0);
    for (std::size_t i = nodes_.size(); i-- > 0;) {
      for (const std::size_t child : nodes_[i].children) {
        const auto& below = nodes_[child].ranks;
        nodes_[i].ranks.insert(nodes_[i].ranks.end(), below.begin(), below.end());
      }
      std::ranges::sort(nodes_[i].ranks);
      if (i > 0 && !nodes_[i].children.empty()) {
        nodes_[i].relay = std::make_unique<Relay>(sets_, nodes_[i].ranks);
      }
      nodes_[i].subtree.emplace(sets_, nodes_[i].ranks);
      by_level_.push_back(i);
    }
    std::ranges::stable_sort(by_level_, std::ranges::greater{},
                             [this](std::size_t i) { return nodes_[i].level; });
  }

  Cost uncached() {
    const int portion = std::max(kRequestsAtOnce / static_cast<int>(nodes_.size()), 1);
    Cost total;
    for (int begin = 0; begin < tensors_; begin += portion) {
      const int end = std::min(begin + portion, tensors_);
      const Cost cost = step(end - begin, [&](int rank) {
        Report report;
        for (int t = begin; t < end; ++t) report.requests.push_back(request(rank, t));
        return report;
      });
      total.root_messages += cost.root_messages;
      total.root_bytes += cost.root_bytes;
      total.root_s += cost.root_s;
      total.path_s += cost.path_s;
    }
    return total;
  }

  Cost cached() {
    Report report;
    report.subtree_hits = ids_;
    Cost best;
    for (int round = 0; round < kRounds; ++round) {
      const Cost cost = step(tensors_, [&](int) { return report; });
      if (round == 0 || cost.path_s < best.path_s) best = cost;
    }
    return best;
  }

  int levels() const { return nodes_[by_level_.front()].level; }

 private:
  static CoordinatorOptions options_for(int tensors) {
    CoordinatorOptions options;
    options.cache_capacity = static_cast<std::size_t>(tensors) + 1;
    return options;
  }

  static std::size_t parent_of(int rank, bool flat) {
    if (flat) return 0;
    const int host = rank / kRanksPerHost;
    if (rank % kRanksPerHost != 0) return static_cast<std::size_t>(host * kRanksPerHost);
    return static_cast<std::size_t>(tree_parent(host) * kRanksPerHost);
  }

  void set_levels(std::size_t node, int level) {
    nodes_[node].level = level;
    for (const std::size_t child : nodes_[node].children) set_levels(child, level + 1);
  }

  Request request(int rank, int tensor) const {
    Request request;
    request.rank = rank;
    request.name = "grad." + std::to_string(tensor);
    request.shapes = {{64, 64}};
    request.where = "train.py:88";
    return request;
  }

  template <class ReportOf>
  Cost step(int tensors, const ReportOf& report_of) {
    const Time time{};
    for (const std::size_t i : by_level_) {
      Node& node = nodes_[i];
      const Report own = report_of(node.rank);
      const double begin = now_s();
      const auto take = [&](const Report& report, const Subtree& from) {
        node.relay ? node.relay->add(report, from, cache_, time)
                   : coordinator_.add(report, from, time);
      };
      node.payload.clear();
      if (i > 0 && !node.relay) {
        encode(own, node.payload);
      } else {
        take(own, Subtree(sets_, {node.rank}));
        for (const std::size_t child : node.children) {
          take(decode_report(nodes_[child].payload), *nodes_[child].subtree);
        }
      }
      if (node.relay) encode(node.relay->take_report(time, kPatience, kPatience), node.payload);
      node.up_s = now_s() - begin;
    }
    return go_down(tensors);
  }

  Cost go_down(int tensors) {
    Node& root = nodes_[0];
    const double begin = now_s();
    const Decision decision = coordinator_.take_decision();
    std::string down;
    encode(decision, down);
    root.up_s += now_s() - begin;
    check(decision, tensors);

    Cost cost;
    std::vector<double> up(static_cast<std::size_t>(levels()) + 1), back = up;
    for (Node& node : nodes_) {
      const double start = now_s();
      if (node.rank != 0) (void)decode_decision(down);
      node.down_s = now_s() - start;
      const auto level = static_cast<std::size_t>(node.level);
      up[level] = std::max(up[level], node.up_s);
      back[level] = std::max(back[level], node.down_s);
      const auto children = static_cast<std::int64_t>(node.children.size());
      cost.most_messages = std::max(cost.most_messages, 2 * children + (node.rank == 0 ? 0 : 2));
    }
    cost.root_messages = 2 * static_cast<std::int64_t>(root.children.size());
    for (const std::size_t child : root.children) {
      cost.root_bytes += static_cast<std::int64_t>(nodes_[child].payload.size() + down.size());
    }
    cost.root_s = root.up_s;
    for (const double seconds : up) cost.path_s += seconds;
    for (const double seconds : back) cost.path_s += seconds;

    for (const Definition& definition : decision.definitions) {
      cache_.define(definition);
      ids_.push_back(definition.id);
    }
    return cost;
  }

  // A benchmark of what went wrong would be worth nothing.
  static void check(const Decision& decision, int tensors) {
    std::size_t run = 0;
    for (const Batch& batch : decision.batches) run += batch.ids.size();
    if (run == static_cast<std::size_t>(tensors) && decision.refusals.empty()) return;
    std::fprintf(stderr, "%zu of %d operations were agreed\n", run, tensors);
    std::exit(1);
  }

  const int tensors_;
  const ProcessSets sets_;
  Coordinator coordinator_;
  ResponseCache cache_;
  std::vector<CacheId> ids_;
  std::vector<Node> nodes_;
  std::vector<std::size_t> by_level_;  // nodes, the deepest first
};

void print_row(int ranks, int tensors, bool flat) {
  Simulation simulation(ranks, tensors, flat);
  const Cost first = simulation.uncached();
  const Cost later = simulation.cached();
  std::printf("| %d | %s | %d | %lld | %lld | %.1f | %.3f | %.3f | %.1f | %.1f |\n", ranks,
              flat ? "flat" : "tree", simulation.levels(),
              static_cast<long long>(later.root_messages),
              static_cast<long long>(later.most_messages),
              static_cast<double>(later.root_bytes) / 1e3, later.root_s * 1e3, later.path_s * 1e3,
              static_cast<double>(first.root_bytes) / 1e6, first.path_s * 1e3);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks_max = argc > 1 ? std::atoi(argv[1]) : 16384;
  const int tensors = argc > 2 ? std::atoi(argv[2]) : 1000;
  std::printf(
      "| ranks | coordinator | levels | messages of the root | most messages of a rank | root kB, "
      "cached | "
      "root CPU ms, cached | path ms, cached | root MB, uncached | path ms, uncached |\n"
      "|---|---|---|---|---|---|---|---|---|---|\n");
  for (int ranks = 2; ranks <= ranks_max; ranks *= 2) {
    for (const bool flat : {false, true}) print_row(ranks, tensors, flat);
  }
  return 0;
}
