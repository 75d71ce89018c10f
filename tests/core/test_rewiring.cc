// Worlds after each other, as in an elastic job: a rank is cut off in the middle of whatever runs,
// those that are left end their engines and go on in a world of another size, while the last one
// still ends.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "thread_world.h"

using namespace polyhvd;
using namespace polyhvd::test;

namespace {

constexpr ProcessSetId kPair = 1;  // ranks 0 and 1

int count_of(const Layout& layout) {
  std::size_t count = 0;
  for (const auto& host : layout) count += host.size();
  return static_cast<int>(count);
}

// What a rank contributes: small integers, whose sums are exact.
std::vector<float> contribution(int rank, std::size_t count, int step) {
  std::vector<float> v(count);
  for (std::size_t i = 0; i < count; ++i) {
    v[i] = static_cast<float>((rank + 1) * (static_cast<int>(i % 7) + step % 5));
  }
  return v;
}

bool is_sum(const std::vector<float>& v, int size, int step) {
  for (std::size_t i = 0; i < v.size(); ++i) {
    const int sum = size * (size + 1) / 2 * (static_cast<int>(i % 7) + step % 5);
    if (v[i] != static_cast<float>(sum)) return false;
  }
  return true;
}

struct Generation {
  Layout layout;
  int victim;  // who is cut off; -1: nobody, and the world ends in good order
};

// A job whose ranks are threads, each with some that submit.
class Job {
 public:
  explicit Job(std::vector<Generation> generations) : generations_(std::move(generations)) {
    worlds_.resize(generations_.size());
  }

  void run() {
    std::vector<std::thread> ranks;
    for (int r = 0; r < count_of(generations_[0].layout); ++r) {
      ranks.emplace_back([this, r] { live(0, r); });
    }
    for (std::thread& rank : ranks) rank.join();
    while (true) {  // who has come later may have made a world with others
      std::vector<std::thread> newcomers;
      {
        std::lock_guard lock(mutex_);
        newcomers.swap(newcomers_);
      }
      if (newcomers.empty()) return;
      for (std::thread& newcomer : newcomers) newcomer.join();
    }
  }

  std::atomic<int> wrong{0};   // results
  std::atomic<int> odd{0};     // failures that are none of a lost rank
  std::atomic<int> ended{0};   // ranks of the last world, in good order
  std::atomic<int> failed{0};  // submitters that a lost rank has stopped

 private:
  // The world of a generation: whoever needs it first makes it, with its newcomers.
  ThreadWorld& world_of(std::size_t generation) {
    std::lock_guard lock(mutex_);
    auto& world = worlds_[generation];
    if (world == nullptr) {
      const auto& [layout, victim] = generations_[generation];
      const int size = count_of(layout);
      std::vector<std::vector<int>> sets;
      if (size > 2) sets.push_back({0, 1});
      world = std::make_unique<ThreadWorld>(layout, sets, nullptr, nullptr, victim);
      if (generation > 0) {
        const int staying = count_of(generations_[generation - 1].layout) - 1;
        for (int r = staying; r < size; ++r) {
          newcomers_.emplace_back([this, generation, r] { live(generation, r); });
        }
      }
    }
    return *world;
  }

  // A rank in one world after the other, until it is cut off or all is done.
  void live(std::size_t generation, int rank) {
    while (true) {
      const int victim = generations_[generation].victim;
      ThreadWorld& world = world_of(generation);
      Engine& engine = world.engine(rank);
      // In the steps of this one, the world loses its victim.
      const int last = 3 + static_cast<int>(generation * 7 % 5);
      std::vector<std::thread> submitters;
      for (int kind = 0; kind < 3; ++kind) {
        submitters.emplace_back([&, kind] { submit(engine, world, rank, kind, victim, last); });
      }
      for (std::thread& submitter : submitters) submitter.join();
      engine.shutdown();
      world.destroy(rank);
      if (victim < 0) ++ended;
      if (victim < 0 || rank == victim) return;
      ++generation;
      rank -= rank > victim;
    }
  }

  void submit(Engine& engine, ThreadWorld& world, int rank, int kind, int victim, int last) {
    if (kind == 2 && world.size() > 2 && rank > 1) return;  // it is not in the process set
    std::vector<std::vector<float>> tensors;                // until all of them are done
    std::vector<OperationPtr> pending;
    try {
      for (int step = 0; victim >= 0 || step < 8; ++step) {
        if (rank == victim && kind == 0 && step == last) world.cut();
        one_step(engine, world.size(), rank, kind, step, tensors, pending);
      }
    } catch (const Failure& failure) {
      const ErrorCode code = failure.error().code;
      const bool is_of_loss = code == ErrorCode::kPeerLost;
      if (!is_of_loss || victim < 0) {
        ++odd;
        MESSAGE(rank << " of " << world.size() << ": " << failure.error().message);
      } else {
        ++failed;
      }
      for (const OperationPtr& operation : pending) {  // each ends, and its memory is free then
        try {
          engine.wait(operation);
        } catch (const Failure&) {
        }
      }
    }
  }

  void one_step(Engine& engine, int size, int rank, int kind, int step,
                std::vector<std::vector<float>>& tensors, std::vector<OperationPtr>& pending) {
    const auto of = [&](std::size_t count) -> std::vector<float>& {
      tensors.push_back(contribution(rank, count, step));
      return tensors.back();
    };
    tensors.reserve(64);
    if (tensors.size() > 32) tensors.clear();
    pending.clear();
    if (kind == 0) {  // a large one, in the middle of which the others are when the victim goes
      auto& v = of(step % 2 == 0 ? 200'000 : 300);
      pending.push_back(engine.submit(allreduce("large", v), true));
      engine.wait(pending.back());
      wrong += !is_sum(v, size, step);
    } else if (kind == 1) {  // several in flight
      const std::size_t first = tensors.size();
      for (const std::size_t count : {1u, 500u, 20'000u}) {
        auto& v = of(count);
        pending.push_back(engine.submit(allreduce("flight" + std::to_string(count), v)));
      }
      for (const OperationPtr& operation : pending) engine.wait(operation);
      for (std::size_t i = first; i < tensors.size(); ++i) wrong += !is_sum(tensors[i], size, step);
    } else if (size > 2) {  // in a process set, whether or not the victim is in it
      auto& v = of(1000);
      pending.push_back(engine.submit(allreduce("pair", v, ReduceOp::kSum, kPair)));
      engine.wait(pending.back());
      wrong += !is_sum(v, 2, step);
    } else {
      Submission s;
      s.name = "gather";
      s.kind = OpKind::kAllgather;
      auto& v = of(64);
      s.inputs = {view(v, DType::kFloat32)};
      pending.push_back(engine.submit(std::move(s)));
      engine.wait(pending.back());
    }
  }

  const std::vector<Generation> generations_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<ThreadWorld>> worlds_;
  std::vector<std::thread> newcomers_;
};

void check(const std::vector<Generation>& generations) {
  Job job(generations);
  job.run();
  CHECK(job.wrong == 0);
  CHECK(job.odd == 0);
  CHECK(job.failed > 0);
  CHECK(job.ended == count_of(generations.back().layout));
}

}  // namespace

TEST_CASE("a job of one host goes on through worlds of other sizes when ranks are cut off") {
  check(
      {{{{0, 1, 2}}, 1}, {{{0, 1}}, 0}, {{{0, 1, 2, 3}}, 0}, {{{0, 1, 2}}, 2}, {{{0, 1, 2}}, -1}});
}

TEST_CASE("a job over several hosts goes on through worlds of other sizes when ranks are cut off") {
  check({{{{0}, {1}, {2}}, 2}, {{{0}, {1}}, 0}, {{{0}, {1}, {2}}, 1}, {{{0}, {1}}, -1}});
}

TEST_CASE("a job whose hosts come and go goes on when ranks of any place are cut off") {
  check({{{{0, 1}, {2, 3}}, 2},
         {{{0, 1}, {2}}, 0},
         {{{0}, {1, 2}, {3}}, 1},
         {{{0, 1, 2}}, 0},
         {{{0}, {1}}, 1},
         {{{0, 1}, {2}}, -1}});
}
