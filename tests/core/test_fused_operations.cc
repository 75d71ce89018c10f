// Allgathers and reducescatters that run as one, by whole engines as threads.
#include <doctest/doctest.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <random>

#include "thread_world.h"

using namespace polyhvd;
using namespace polyhvd::test;

namespace {

const std::vector<Layout> kLayouts = {
    {{0}},           {{0, 1}},         {{0, 1, 2}},      {{0, 1, 2, 3}},   {{0}, {1}},
    {{0}, {1}, {2}}, {{0, 1}, {2, 3}}, {{0, 1, 2}, {3}}, {{0, 2}, {1, 3}},
};

std::string text_of(const Layout& layout) {
  std::string text;
  for (const auto& host : layout) text += std::to_string(host.size()) + " ";
  return text;
}

// Rows of the gathered tensor `i`: uneven, none at times, and now and then many.
std::int64_t rows_of(int rank, int i) {
  if (i % 17 == 5) return 40'000 + 1000 * rank;
  return (rank * 3 + i) % 5;
}

std::int64_t cell(int rank, int i, std::int64_t at) { return rank * 10'000 + i * 31 + at % 97; }

// Floats of many sizes, so that every order of adding has bits of its own.
std::vector<float> terms_of(int rank, int i, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(rank) * 7919 + static_cast<unsigned>(i));
  std::vector<float> values(count);
  for (float& v : values) {
    v = std::ldexp(static_cast<float>(random() % 1000) - 500, static_cast<int>(random() % 20));
  }
  return values;
}

std::size_t length_of(int i) { return i % 19 == 7 ? 100'003 : static_cast<std::size_t>(i % 23); }

// One tensor of doubles and one of int8, or only the former.
struct Gathered {
  std::vector<double> wide;
  std::vector<std::int8_t> narrow;
  OperationPtr operation;

  Gathered(int rank, int i) {
    for (std::int64_t at = 0; at < rows_of(rank, i); ++at) {
      wide.push_back(static_cast<double>(cell(rank, i, at)));
    }
    for (std::int64_t at = 0; i % 3 == 0 && at < rows_of(rank, i + 1); ++at) {
      narrow.push_back(static_cast<std::int8_t>(cell(rank, i, at)));
    }
  }
  Submission submission(int i, ProcessSetId set) {
    Submission s;
    s.name = "gather " + std::to_string(i);
    s.kind = OpKind::kAllgather;
    s.process_set = set;
    s.inputs = {view(wide, DType::kFloat64)};
    if (i % 3 == 0) s.inputs.push_back(view(narrow, DType::kInt8));
    return s;
  }
  int wrong(int i, std::span<const int> members) const {
    std::vector<double> expected;
    std::vector<std::int8_t> expected_narrow;
    for (const int rank : members) {
      const Gathered theirs(rank, i);
      expected.insert(expected.end(), theirs.wide.begin(), theirs.wide.end());
      expected_narrow.insert(expected_narrow.end(), theirs.narrow.begin(), theirs.narrow.end());
    }
    return differs(0, expected) + (i % 3 == 0 ? differs(1, expected_narrow) : 0);
  }

 private:
  template <class T>
  int differs(std::size_t index, const std::vector<T>& expected) const {
    const OwnedBuffer& buffer = *operation->buffers.at(index);
    if (buffer.shape() != Shape{static_cast<std::int64_t>(expected.size())}) return 1;
    const std::size_t bytes = expected.size() * sizeof(T);
    return bytes > 0 && std::memcmp(buffer.data(), expected.data(), bytes) != 0 ? 1 : 0;
  }
};

struct Scattered {
  std::vector<float> terms;
  OperationPtr operation;

  Scattered(int rank, int i) : terms(terms_of(rank, i, length_of(i))) {}
  Submission submission(int i, ProcessSetId set) {
    Submission s;
    s.name = "scatter " + std::to_string(i);
    s.kind = OpKind::kReducescatter;
    s.op = i % 4 == 1 ? ReduceOp::kMax : ReduceOp::kSum;
    s.process_set = set;
    s.inputs = {view(terms, DType::kFloat32)};
    return s;
  }
  // A sum is made in order of rank, to the bit.
  int wrong(int i, std::span<const int> members, int position) const {
    std::vector<float> sum(length_of(i));
    for (std::size_t m = 0; m < members.size(); ++m) {
      const std::vector<float> theirs = terms_of(members[m], i, sum.size());
      for (std::size_t at = 0; at < sum.size(); ++at) {
        const bool is_max = i % 4 == 1;
        sum[at] = m == 0   ? theirs[at]
                  : is_max ? std::max(sum[at], theirs[at])
                           : sum[at] + theirs[at];
      }
    }
    const auto size = static_cast<int>(members.size());
    const auto rows = static_cast<std::int64_t>(sum.size());
    std::int64_t first = 0;
    for (int m = 0; m < position; ++m) first += rows_kept(rows, m, size);
    const std::int64_t kept = rows_kept(rows, position, size);
    const OwnedBuffer& buffer = *operation->buffers.at(0);
    if (buffer.shape() != Shape{kept}) return 1;
    return kept > 0 && std::memcmp(buffer.data(), sum.data() + first,
                                   static_cast<std::size_t>(kept) * sizeof(float)) != 0
               ? 1
               : 0;
  }
};

// Submits `count` of both kinds, in another order on each rank, and counts what is wrong.
int exchange_all(Engine& engine, int rank, std::span<const int> members, ProcessSetId set,
                 int count) {
  std::vector<Gathered> gathered;
  std::vector<Scattered> scattered;
  for (int i = 0; i < count; ++i) {
    gathered.emplace_back(rank, i);
    scattered.emplace_back(rank, i);
  }
  for (int k = 0; k < count; ++k) {
    const int i = rank % 2 == 0 ? k : count - 1 - k;
    const auto at = static_cast<std::size_t>(i);
    gathered[at].operation = engine.submit(gathered[at].submission(i, set));
    scattered[at].operation = engine.submit(scattered[at].submission(i, set));
  }
  int wrong = 0;
  const int position = *position_in(members, rank);
  for (int i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    engine.wait(gathered[at].operation);
    engine.wait(scattered[at].operation);
    wrong += gathered[at].wrong(i, members);
    wrong += scattered[at].wrong(i, members, position);
  }
  return wrong;
}

std::vector<int> all_of(int size) {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(r);
  return ranks;
}

OperationPtr run_alone(Engine& engine, OpKind kind) {
  Submission s;
  s.name = std::string(name_of(kind));
  s.kind = kind;
  OperationPtr operation = engine.submit(std::move(s), true);
  engine.wait(operation);
  return operation;
}

}  // namespace

TEST_CASE("gathers and scatters in flight together give what each would alone, to the bit") {
  for (const bool reproducible : {false, true}) {
    for (const Layout& layout : kLayouts) {
      CAPTURE(text_of(layout));
      ThreadWorld world(layout, {}, [&](EngineOptions& o) { o.reproducible = reproducible; });
      std::atomic<int> wrong{0};
      world.run([&](int rank, Engine& engine) {
        for (int step = 0; step < 3; ++step) {
          wrong += exchange_all(engine, rank, all_of(world.size()), kWorld, 40);
        }
      });
      CHECK(wrong == 0);
      world.shutdown();
    }
  }
}

TEST_CASE("a bound on the bytes of a batch changes no bit of gathers and scatters") {
  for (const std::size_t bytes_max : {std::size_t{0}, std::size_t{1000}, std::size_t{1} << 20}) {
    ThreadWorld world({{0, 1}, {2}}, {},
                      [&](EngineOptions& o) { o.coordinator.fusion.bytes_max = bytes_max; });
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      wrong += exchange_all(engine, rank, all_of(world.size()), kWorld, 30);
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

TEST_CASE("gathers and scatters of overlapping process sets run as one within each") {
  const std::vector<std::vector<int>> sets = {{0, 1}, {1, 2, 3}, {0, 3}};
  for (const Layout& layout : {one_host(4), Layout{{0, 1}, {2, 3}}, Layout{{0, 2}, {1}, {3}}}) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout, sets);
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      std::vector<std::thread> threads;
      for (std::size_t s = 0; s < sets.size(); ++s) {
        if (!position_in(sets[s], rank)) continue;
        threads.emplace_back([&, s] {
          wrong += exchange_all(engine, rank, sets[s], static_cast<ProcessSetId>(s + 1), 30);
        });
      }
      for (std::thread& thread : threads) thread.join();
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

// All that is submitted in one callback is announced together, and the others have announced it
// before they announced what the callback belongs to.
TEST_CASE("two hundred gathers, and as many scatters, that are ready together are two batches") {
  constexpr int kCount = 200;
  for (const Layout& layout : {one_host(3), Layout{{0, 1}, {2}}}) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout, {}, [](EngineOptions& o) { o.coordinator.cache_capacity = 4096; });
    std::atomic<int> wrong{0};
    std::atomic<std::uint64_t> batches{0};
    world.run([&](int rank, Engine& engine) {
      const std::vector<int> members = all_of(world.size());
      for (int step = 0; step < 2; ++step) {
        std::vector<Gathered> gathered;
        std::vector<Scattered> scattered;
        for (int i = 0; i < kCount; ++i) {
          gathered.emplace_back(rank, 3 * i);
          scattered.emplace_back(rank, 4 * i);
        }
        const auto submit_all = [&] {
          for (int i = 0; i < kCount; ++i) {
            const auto at = static_cast<std::size_t>(i);
            gathered[at].operation = engine.submit(gathered[at].submission(3 * i, kWorld));
            scattered[at].operation = engine.submit(scattered[at].submission(4 * i, kWorld));
          }
        };
        const std::uint64_t before = engine.counters().at("batches");
        std::vector<float> gate(3, 1.0F);
        Submission s = allreduce("gate", gate);
        std::atomic<bool> called{false};
        s.done = [&](const Error*) {
          if (rank == 1) submit_all();
          called = true;
        };
        if (rank != 1) submit_all();
        engine.wait(engine.submit(std::move(s), true));
        while (!called) std::this_thread::yield();
        for (int i = 0; i < kCount; ++i) {
          const auto at = static_cast<std::size_t>(i);
          engine.wait(gathered[at].operation);
          engine.wait(scattered[at].operation);
          wrong += gathered[at].wrong(3 * i, members);
          wrong += scattered[at].wrong(4 * i, members, rank);
        }
        if (rank == 0) batches += engine.counters().at("batches") - before - 1;  // the gate
        run_alone(engine, OpKind::kBarrier);
      }
    });
    CHECK(wrong == 0);
    CHECK(batches == 2 * 2);
    world.shutdown();
  }
}

TEST_CASE("ranks that have joined stand in for batches of gathers and scatters") {
  for (const Layout& layout : {one_host(3), Layout{{0, 1}, {2}}, Layout{{0}, {1}, {2}}}) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      for (int step = 0; step < 2 + 2 * rank; ++step) {
        std::vector<std::vector<float>> rows(30);
        std::vector<OperationPtr> flying;
        for (std::size_t i = 0; i < rows.size(); ++i) {
          rows[i].assign(static_cast<std::size_t>(rank) + i, static_cast<float>(rank));
          Submission s = allreduce("rows " + std::to_string(i), rows[i]);
          s.kind = OpKind::kAllgather;
          s.outputs.clear();
          flying.push_back(engine.submit(std::move(s)));
        }
        std::vector<std::vector<float>> sums(30);
        for (std::size_t i = 0; i < sums.size(); ++i) {
          sums[i].assign(3 + i, static_cast<float>(rank + 1));
          Submission s = allreduce("parts " + std::to_string(i), sums[i]);
          s.kind = OpKind::kReducescatter;
          s.outputs.clear();
          flying.push_back(engine.submit(std::move(s)));
        }
        std::size_t there = 0;
        float sum = 0;
        std::size_t ranks = 0;
        for (int r = 0; r < 3; ++r) {
          if (step >= 2 + 2 * r) continue;
          ++ranks;
          there += static_cast<std::size_t>(r);
          sum += static_cast<float>(r + 1);
        }
        for (std::size_t i = 0; i < flying.size(); ++i) {
          engine.wait(flying[i]);
          const OwnedBuffer& buffer = *flying[i]->buffers.at(0);
          if (i < rows.size()) {
            wrong += buffer.shape()[0] != static_cast<std::int64_t>(there + ranks * i);
            continue;
          }
          float first = 0;
          std::memcpy(&first, buffer.data(), sizeof first);
          wrong += first != sum;
        }
      }
      run_alone(engine, OpKind::kJoin);
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}
