// Exchange, scatter, Adasum, join and changing process sets, by whole engines as threads.
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
    {{0}},      {{0, 1}},         {{0, 1, 2}},   {{0, 1, 2, 3}},
    {{0}, {1}}, {{0, 1}, {2, 3}}, {{0, 1}, {2}}, {{0, 2}, {1, 3}},
};

std::string text_of(const Layout& layout) {
  std::string text;
  for (const auto& host : layout) text += std::to_string(host.size()) + " ";
  return text;
}

// Rows that `from` sends to `to`: uneven, and sometimes none.
std::int64_t rows_between(int from, int to, std::int64_t scale) {
  return (from + 2 * to) % 4 * scale;
}

float cell(int from, int to, std::int64_t row) {
  return static_cast<float>(from * 100 + to * 10) + static_cast<float>(row % 7);
}

Submission of_kind(OpKind kind, std::string name, std::vector<float>& values) {
  Submission s = allreduce(std::move(name), values);
  s.kind = kind;
  s.outputs.clear();
  return s;
}

std::span<const float> floats_of(const Operation& operation) {
  const OwnedBuffer& buffer = *operation.buffers.at(0);
  return {reinterpret_cast<const float*>(buffer.data()),
          static_cast<std::size_t>(element_count(buffer.shape()))};
}

OperationPtr run_alone(Engine& engine, OpKind kind, std::vector<std::int64_t> numbers = {},
                       int root = -1) {
  Submission s;
  s.name = std::string(name_of(kind));
  s.kind = kind;
  s.numbers = std::move(numbers);
  s.root = root;
  OperationPtr operation = engine.submit(std::move(s), true);
  engine.wait(operation);
  return operation;
}

}  // namespace

TEST_CASE("alltoall sends every member its rows, however many, and says how many came") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    const int size = world.size();
    world.run([&](int rank, Engine& engine) {
      for (const std::int64_t scale : {1, 3, 50'000}) {
        std::vector<float> sent;
        std::vector<std::int64_t> splits;
        for (int to = 0; to < size; ++to) {
          splits.push_back(rows_between(rank, to, scale));
          for (std::int64_t i = 0; i < splits.back(); ++i) sent.push_back(cell(rank, to, i));
        }
        sent.push_back(-1);  // one row that goes nowhere
        Submission s = of_kind(OpKind::kAlltoall, "exchange", sent);
        s.numbers = splits;
        const OperationPtr operation = engine.submit(std::move(s), true);
        engine.wait(operation);
        std::vector<float> expected;
        const auto* received =
            reinterpret_cast<const std::int32_t*>(operation->buffers.at(1)->data());
        for (int from = 0; from < size; ++from) {
          const std::int64_t rows = rows_between(from, rank, scale);
          wrong += received[from] != rows;
          for (std::int64_t i = 0; i < rows; ++i) expected.push_back(cell(from, rank, i));
        }
        wrong += !std::ranges::equal(floats_of(*operation), expected);
      }
    });
    CHECK(wrong == 0);
    CHECK(world.engine(0).counters().at("cache_hits") == 2);  // other splits, the same operation
    world.shutdown();
  }
}

TEST_CASE("reducescatter leaves every member its rows of the sum, the first ones one more") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    const int size = world.size();
    world.run([&](int rank, Engine& engine) {
      for (const std::int64_t rows : {0, 1, 5, 400'003}) {
        std::vector<float> mine(static_cast<std::size_t>(rows));
        for (std::size_t i = 0; i < mine.size(); ++i) {
          mine[i] = static_cast<float>(rank + 1) * static_cast<float>(i % 1000);
        }
        const OperationPtr operation = engine.submit(
            of_kind(OpKind::kReducescatter, "scatter" + std::to_string(rows), mine), true);
        engine.wait(operation);
        std::int64_t first = 0;
        for (int m = 0; m < rank; ++m) first += rows_kept(rows, m, size);
        const auto kept = floats_of(*operation);
        wrong += static_cast<std::int64_t>(kept.size()) != rows_kept(rows, rank, size);
        const auto ranks_sum = static_cast<float>(size * (size + 1) / 2);
        for (std::size_t i = 0; i < kept.size(); ++i) {
          wrong += kept[i] !=
                   ranks_sum * static_cast<float>((static_cast<std::size_t>(first) + i) % 1000);
        }
      }
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

// Floats of many sizes, so that every order of adding has bits of its own. Those of each rank are
// made once: under a sanitizer that takes longer than adding them. Another count begins at another
// one of them.
std::vector<float> terms_of(int rank, std::size_t count) {
  constexpr int kRanks = 6;
  constexpr std::size_t kMost = 1'300'001, kStarts = 97;
  static const std::vector<std::vector<float>> of_rank = [] {
    std::vector<std::vector<float>> made(kRanks, std::vector<float>(kMost + kStarts));
    for (int r = 0; r < kRanks; ++r) {
      std::mt19937 random(static_cast<unsigned>(r) * 7919);
      for (float& v : made[static_cast<std::size_t>(r)]) {
        v = std::ldexp(static_cast<float>(random() % 1000) - 500, static_cast<int>(random() % 20));
      }
    }
    return made;
  }();
  const std::vector<float>& terms = of_rank.at(static_cast<std::size_t>(rank));
  const auto first = terms.begin() + static_cast<std::ptrdiff_t>(count % kStarts);
  return {first, first + static_cast<std::ptrdiff_t>(count)};
}

// Sums over hosts, in order, of the sums over each host's ranks.
std::vector<float> sum_of(const Layout& layout, std::size_t count) {
  std::vector<float> sum;
  for (const auto& host : layout) {
    std::vector<float> here;
    for (const int rank : host) {
      const std::vector<float> terms = terms_of(rank, count);
      if (here.empty()) {
        here = terms;
      } else {
        for (std::size_t i = 0; i < count; ++i) here[i] += terms[i];
      }
    }
    if (sum.empty()) {
      sum = here;
    } else {
      for (std::size_t i = 0; i < count; ++i) sum[i] += here[i];
    }
  }
  return sum;
}

TEST_CASE("an element is the sum over hosts, in order, of their sums, whatever way it takes") {
  // One piece, many pieces, and tensors whose ends lie within pieces; large and small.
  const std::vector<std::vector<std::size_t>> groups = {
      {1}, {5000}, {16'384}, {40'001}, {1'300'001}, {7, 300'000, 1, 0, 90'001, 33, 1'000'003}};
  constexpr int kStaged = 0, kAttached = 2;  // of host::Attaching
  const std::vector<std::pair<Layout, int>> ways = {{{{0, 1}}, kStaged},
                                                    {{{0, 1}}, kAttached},
                                                    {{{0, 1, 2}}, kStaged},
                                                    {{{0, 1, 2}}, kAttached},
                                                    {{{0}, {1}}, kStaged},
                                                    {{{0}, {1}, {2}}, kStaged},
                                                    {{{0}, {1}, {2}, {3}, {4}}, kStaged},
                                                    {{{0, 1}, {2, 3}, {4, 5}}, kAttached},
                                                    {{{0, 1}, {2}, {3, 4}}, kStaged}};
  for (const auto& [layout, attaching] : ways) {
    CAPTURE(text_of(layout));
    CAPTURE(attaching);
    std::vector<std::vector<std::vector<float>>> expected;
    for (const auto& counts : groups) {
      auto& sums = expected.emplace_back();
      for (const std::size_t count : counts) sums.push_back(sum_of(layout, count));
    }
    ThreadWorld world(
        layout, {}, [&](EngineOptions& options) { options.attaching = attaching; },
        [&](Connections& w) { w.pids.assign(w.labels.size(), getpid()); });
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      for (const int apart : {0, 1, 2}) {  // none, every second one, all
        for (std::size_t g = 0; g < groups.size(); ++g) {
          std::vector<std::vector<float>> tensors, results;
          Submission s;
          s.name = "group " + std::to_string(g) + " apart " + std::to_string(apart);
          for (const std::size_t count : groups[g]) {
            tensors.push_back(terms_of(rank, count));
            results.emplace_back(count);
          }
          for (auto& tensor : tensors) s.inputs.push_back(view(tensor, DType::kFloat32));
          for (auto& result : results) s.outputs.push_back(view(result, DType::kFloat32));
          for (std::size_t i = 0; i < s.inputs.size(); ++i) {
            if (apart + i % 2 < 2) s.outputs[i] = s.inputs[i];
          }
          const auto outputs = s.outputs;
          engine.wait(engine.submit(std::move(s), true));
          for (std::size_t i = 0; i < outputs.size(); ++i) {
            const auto& found = outputs[i].data == tensors[i].data() ? tensors[i] : results[i];
            wrong += found != expected[g][i];
          }
        }
      }
    });
    CHECK((world.engine(0).counters().at("cma_bytes") > 0) ==
          (layout.size() == 1 && attaching == kAttached));
    CHECK(wrong == 0);
    world.shutdown();
  }
}

TEST_CASE("a broadcast reaches every host from every root, and every host passes it on") {
  const std::vector<std::size_t> counts = {1, 0, 70'001, 800'003};
  for (const Layout& layout :
       {Layout{{0}, {1}}, Layout{{0, 1}, {2}, {3, 4}}, Layout{{0}, {1}, {2}, {3}},
        Layout{{0}, {1}, {2}, {3}, {4}, {5}, {6}}}) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      for (int root = 0; root < world.size(); ++root) {
        std::vector<std::vector<float>> tensors;
        Submission s;
        s.name = "from " + std::to_string(root);
        s.kind = OpKind::kBroadcast;
        s.root = root;
        for (const std::size_t count : counts) {
          tensors.emplace_back(count, static_cast<float>(rank == root ? root : -1));
        }
        for (auto& tensor : tensors) s.inputs.push_back(view(tensor, DType::kFloat32));
        s.outputs = s.inputs;
        engine.wait(engine.submit(std::move(s), true));
        for (std::size_t i = 0; i < counts.size(); ++i) {
          wrong += tensors[i] != std::vector<float>(counts[i], static_cast<float>(root));
        }
        if (rank == 0 && root == 0 && layout.size() == 7) {  // to three hosts, not to six
          CHECK(engine.counters().at("tcp_bytes_sent") == 3 * 4 * (1 + 70'001 + 800'003));
        }
      }
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

TEST_CASE("between hosts with one rank each a tensor crosses in its own type, and once") {
  constexpr std::size_t kCount = 4'000'000;
  constexpr std::uint16_t kOne = 0x3C00, kThree = 0x4200;  // of float16
  ThreadWorld world(Layout{{0}, {1}, {2}});
  world.run([&](int, Engine& engine) {
    std::vector<std::uint16_t> ones(kCount, kOne);
    Submission s;
    s.name = "halves";
    s.inputs = {view(ones, DType::kFloat16)};
    s.outputs = s.inputs;
    engine.wait(engine.submit(std::move(s), true));
    CHECK(ones == std::vector<std::uint16_t>(kCount, kThree));
    // A third of the terms to each of the others, and the sum of a third.
    const auto sent = static_cast<double>(engine.counters().at("tcp_bytes_sent"));
    CHECK(sent == doctest::Approx(2 * kCount * 4.0 / 3).epsilon(0.01));
  });
  world.shutdown();
}

TEST_CASE("in reproducible mode neither hosts nor slices show in the bits of a sum") {
  std::vector<float> expected;
  for (const Layout& layout : {one_host(4), Layout{{0, 1}, {2, 3}}, Layout{{0, 2}, {1, 3}},
                               Layout{{0}, {1}, {2}, {3}}, Layout{{0, 3, 1}, {2}}}) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout, {}, [](EngineOptions& options) { options.reproducible = true; });
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      std::mt19937 random(static_cast<unsigned>(rank));
      std::vector<float> values(1'300'001);
      for (float& v : values) {
        v = std::ldexp(static_cast<float>(random() % 1000) - 500, static_cast<int>(random() % 40));
      }
      engine.wait(engine.submit(allreduce("x", values), true));
      if (rank == 0 && expected.empty()) expected = values;
      if (rank == 0) wrong += std::memcmp(values.data(), expected.data(), values.size() * 4) != 0;
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

TEST_CASE("Adasum averages what is parallel and adds what is orthogonal, tensor by tensor") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    const auto size = static_cast<std::size_t>(world.size());
    world.run([&](int rank, Engine& engine) {
      std::vector<float> parallel(5001, 3.0f);
      std::vector<float> orthogonal(size, 0.0f);
      orthogonal[static_cast<std::size_t>(rank)] = 2.0f;
      std::vector<float> zero(17, 0.0f);
      Submission s = allreduce("adasum", parallel, ReduceOp::kAdasum);
      s.inputs.push_back(view(orthogonal, DType::kFloat32));
      s.inputs.push_back(view(zero, DType::kFloat32));
      s.outputs = s.inputs;
      engine.wait(engine.submit(std::move(s), true));
      for (const float v : parallel) wrong += std::abs(v - 3.0f) > 1e-5f;
      for (const float v : orthogonal) wrong += v != 2.0f;
      for (const float v : zero) wrong += v != 0.0f;
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

TEST_CASE("ranks that have joined stand in with neutral elements until all have") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    const int size = world.size();
    world.run([&](int rank, Engine& engine) {
      for (int epoch = 0; epoch < 3; ++epoch) {
        const int steps = 2 + (rank + epoch) % size * 2;
        for (int step = 0; step < steps; ++step) {
          int active = 0;
          float largest = 0;
          for (int r = 0; r < size; ++r) {
            if (step >= 2 + (r + epoch) % size * 2) continue;
            ++active;
            largest = std::max(largest, static_cast<float>(r) - 10);
            if (active == 1) largest = static_cast<float>(r) - 10;
          }
          std::vector<float> sum(3000, 1.0f);
          std::vector<float> max(40, static_cast<float>(rank) - 10);
          std::vector<float> rows(static_cast<std::size_t>(rank) + 1, 1.0f);
          std::vector<float> parts(static_cast<std::size_t>(size), 1.0f);
          const auto a = engine.submit(allreduce("sum", sum));
          const auto b = engine.submit(allreduce("max", max, ReduceOp::kMax));
          const auto c = engine.submit(of_kind(OpKind::kAllgather, "rows", rows));
          const auto d = engine.submit(of_kind(OpKind::kAlltoall, "parts", parts));
          for (const auto& operation : {a, b, c, d}) engine.wait(operation);
          wrong += sum[2999] != static_cast<float>(active);
          wrong += max[39] != largest;
          std::int64_t expected = 0;
          for (int r = 0; r < size; ++r) {
            if (step < 2 + (r + epoch) % size * 2) expected += r + 1;
          }
          wrong += static_cast<std::int64_t>(floats_of(*c).size()) != expected;
          wrong += static_cast<int>(floats_of(*d).size()) != active;
        }
        const OperationPtr join = run_alone(engine, OpKind::kJoin);
        const auto last = static_cast<int>(join->number);
        wrong += (last + epoch) % size != size - 1;  // the one with the most steps
      }
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

TEST_CASE("the root of a broadcast may not have joined") {
  ThreadWorld world({{0, 1}, {2}});
  std::atomic<int> refused{0};
  world.run([&](int rank, Engine& engine) {
    if (rank != 1) {
      std::vector<float> values(10, 1.0f);
      Submission s = allreduce("weights", values);
      s.kind = OpKind::kBroadcast;
      s.root = 1;
      try {
        engine.wait(engine.submit(std::move(s)));
      } catch (const Failure& failure) {
        refused += failure.error().message.find("rank 1, has called join()") != std::string::npos;
      }
    }
    run_alone(engine, OpKind::kJoin);
  });
  CHECK(refused == 2);
  world.shutdown();
}

TEST_CASE("process sets come and go while others work") {
  for (const Layout& layout : {one_host(3), Layout{{0, 1}, {2}}}) {
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      for (int step = 0; step < 10; ++step) {
        std::vector<float> everywhere(50'000, 1.0f);
        const auto busy = engine.submit(allreduce("busy", everywhere));
        const std::vector<std::int64_t> ranks{step % 2, 2};
        const auto set =
            static_cast<ProcessSetId>(run_alone(engine, OpKind::kAddProcessSet, ranks)->number);
        wrong += set != static_cast<ProcessSetId>(step + 1);
        std::vector<float> here(1000, 1.0f);
        if (rank == 2 || rank == step % 2) {
          engine.wait(engine.submit(allreduce("x", here, ReduceOp::kSum, set)));
          wrong += here[999] != 2;
        }
        run_alone(engine, OpKind::kRemoveProcessSet, {}, static_cast<int>(set));
        engine.wait(busy);
        wrong += everywhere[49'999] != 3;
        try {
          engine.wait(engine.submit(allreduce("x", here, ReduceOp::kSum, set)));
          ++wrong;
        } catch (const Failure& failure) {
          wrong += failure.error().message.find("was removed") == std::string::npos;
        }
      }
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

TEST_CASE("removing a process set fails what its members still wait for") {
  ThreadWorld world(one_host(3));
  std::atomic<int> failed{0};
  world.run([&](int rank, Engine& engine) {
    const OperationPtr pair = run_alone(engine, OpKind::kAddProcessSet, {0, 1});
    std::vector<float> values(10, 1.0f);
    OperationPtr waiting;
    if (rank == 1) waiting = engine.submit(allreduce("x", values, ReduceOp::kSum, 1));
    run_alone(engine, OpKind::kRemoveProcessSet, {}, static_cast<int>(pair->number));
    if (rank != 1) return;
    try {
      engine.wait(waiting);
    } catch (const Failure& failure) {
      failed += failure.error().message.find("was removed") != std::string::npos;
    }
  });
  CHECK(failed == 1);
  world.shutdown();
}

TEST_CASE("a group of several dtypes is one operation") {
  ThreadWorld world(one_host(3));
  std::atomic<int> wrong{0};
  world.run([&](int, Engine& engine) {
    for (int step = 0; step < 3; ++step) {
      std::vector<float> a(100, 1.0f);
      std::vector<double> b(7, 2.0);
      std::vector<float> c(9, 3.0f);
      Submission s = allreduce("group", a);
      s.inputs.push_back(view(b, DType::kFloat64));
      s.inputs.push_back(view(c, DType::kFloat32));
      s.outputs = s.inputs;
      engine.wait(engine.submit(std::move(s), true));
      wrong += a[99] != 3 || b[6] != 6 || c[8] != 9;
    }
  });
  CHECK(wrong == 0);
  CHECK(world.engine(1).counters().at("cache_hits") == 2);
  world.shutdown();
}
