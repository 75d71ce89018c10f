// Whole engines as threads of one process: results, order, errors and ends.
#include <doctest/doctest.h>
#include <fcntl.h>

#include <array>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <new>
#include <random>

#include "thread_world.h"

using namespace polyhvd;
using namespace polyhvd::test;

namespace {

const std::vector<Layout> kLayouts = {
    {{0}},         {{0, 1}},        {{0, 1, 2}},      {{0, 1, 2, 3}}, {{0}, {1}}, {{0, 1}, {2, 3}},
    {{0, 1}, {2}}, {{0}, {1}, {2}}, {{0, 2}, {1, 3}},
};

std::string text_of(const Layout& layout) {
  std::string text;
  for (const auto& host : layout) text += std::to_string(host.size()) + " ";
  return text;
}

int engine_count(const Layout& layout) {
  std::size_t count = 0;
  for (const auto& host : layout) count += host.size();
  return static_cast<int>(count);
}

float value(int rank, std::size_t i) {
  return static_cast<float>((rank + 1) * 1000 + static_cast<int>(i % 997)) / 8.0f;
}

std::vector<float> values(int rank, std::size_t count) {
  std::vector<float> v(count);
  for (std::size_t i = 0; i < count; ++i) v[i] = value(rank, i);
  return v;
}

bool is_sum(const std::vector<float>& v, int size) {
  for (std::size_t i = 0; i < v.size(); ++i) {
    float sum = 0;
    for (int r = 0; r < size; ++r) sum += value(r, i);
    if (v[i] != sum) return false;
  }
  return true;
}

}  // namespace

TEST_CASE("an allreduce of any size over any layout is the sum") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      for (const std::size_t count : {0u, 1u, 255u, 5000u, 40'000u, 300'001u}) {
        for (int repeat = 0; repeat < 3; ++repeat) {
          auto v = values(rank, count);
          engine.wait(engine.submit(allreduce("x" + std::to_string(count), v), true));
          if (!is_sum(v, world.size())) ++wrong;
        }
      }
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

TEST_CASE("many asynchronous allreduces in another order on each rank all complete") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      std::mt19937 random(static_cast<unsigned>(rank));
      for (int step = 0; step < 6; ++step) {
        std::vector<std::vector<float>> tensors;
        for (std::size_t i = 0; i < 40; ++i) tensors.push_back(values(rank, 1 + i * i * 7));
        std::vector<std::size_t> order(tensors.size());
        for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
        std::shuffle(order.begin(), order.end(), random);
        std::vector<OperationPtr> operations;
        for (const std::size_t i : order) {
          operations.push_back(engine.submit(allreduce("t" + std::to_string(i), tensors[i])));
        }
        for (const auto& operation : operations) engine.wait(operation);
        for (const auto& tensor : tensors) wrong += !is_sum(tensor, world.size());
      }
    });
    CHECK(wrong == 0);
    CHECK(world.engine(0).counters().at("cache_hits") >= 40 * 4);
    world.shutdown();
  }
}

TEST_CASE("cancelling values give the bits of the sum in rank order, however they travel") {
  // (1e8 + 1) - 1e8 and 1e8 - 1e8 + 1 differ in float: order shows.
  const std::array<float, 4> terms{1e8f, 1.0f, -1e8f, 0.25f};
  for (const int size : {3, 4}) {
    float expected = terms[0];
    for (int r = 1; r < size; ++r) expected += terms[static_cast<std::size_t>(r)];
    ThreadWorld world(one_host(size));
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      std::mt19937 random(static_cast<unsigned>(rank) + 7);
      for (int step = 0; step < 20; ++step) {
        std::vector<std::vector<float>> tensors;
        for (std::size_t count : {1u, 33u, 1000u, 9000u, 70'000u}) {
          tensors.emplace_back(count, terms[static_cast<std::size_t>(rank)]);
        }
        std::vector<std::size_t> order{0, 1, 2, 3, 4};
        std::shuffle(order.begin(), order.end(), random);
        std::vector<OperationPtr> operations;
        for (const std::size_t i : order) {
          operations.push_back(engine.submit(allreduce("t" + std::to_string(i), tensors[i])));
        }
        for (const auto& operation : operations) engine.wait(operation);
        for (const auto& tensor : tensors) {
          for (const float v : tensor) wrong += v != expected;
        }
      }
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

TEST_CASE("allgather concatenates different numbers of rows, broadcast copies from any root") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      for (const std::int64_t scale : {1, 20'000}) {
        std::vector<float> mine(static_cast<std::size_t>(rank * scale) * 2,
                                static_cast<float>(rank));
        Submission s;
        s.name = "gather" + std::to_string(scale);
        s.kind = OpKind::kAllgather;
        s.inputs = {{mine.data(), {rank * scale, 2}, DType::kFloat32, {}}};
        const auto operation = engine.submit(std::move(s), true);
        engine.wait(operation);
        const OwnedBuffer& all = *operation->buffers.at(0);
        const auto* data = reinterpret_cast<const float*>(all.data());
        std::int64_t row = 0;
        for (int r = 0; r < world.size(); ++r) {
          for (std::int64_t i = 0; i < r * scale; ++i, ++row)
            wrong += data[row * 2] != static_cast<float>(r);
        }
        wrong += all.shape() != Shape{row, 2};
        for (int root = 0; root < world.size(); ++root) {
          std::vector<float> v(static_cast<std::size_t>(scale) * 3 + 1, static_cast<float>(rank));
          Submission b;
          b.name = "broadcast" + std::to_string(scale) + "." + std::to_string(root);
          b.kind = OpKind::kBroadcast;
          b.root = root;
          b.inputs = {view(v, DType::kFloat32)};
          b.outputs = b.inputs;
          engine.wait(engine.submit(std::move(b)));
          for (const float x : v) wrong += x != static_cast<float>(root);
        }
      }
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

TEST_CASE("overlapping process sets work at the same time, without those who are not members") {
  ThreadWorld world({{0, 1, 2}, {3}}, {{0, 1}, {1, 2, 3}});
  std::atomic<int> wrong{0};
  world.run([&](int rank, Engine& engine) {
    for (int step = 0; step < 30; ++step) {
      std::vector<OperationPtr> operations;
      std::vector<float> a(1000, 1), b(1000, 1), c(1000, 1);
      if (rank <= 1) operations.push_back(engine.submit(allreduce("x", a, ReduceOp::kSum, 1)));
      if (rank >= 1) operations.push_back(engine.submit(allreduce("x", b, ReduceOp::kSum, 2)));
      operations.push_back(engine.submit(allreduce("x", c)));
      for (const auto& operation : operations) engine.wait(operation);
      wrong += rank <= 1 && a[999] != 2;
      wrong += rank >= 1 && b[999] != 3;
      wrong += c[999] != 4;
    }
  });
  CHECK(wrong == 0);
  world.shutdown();
}

TEST_CASE("ranks that disagree all get the error, and go on working") {
  for (const Layout& layout : {Layout{{0, 1, 2}}, Layout{{0, 1}, {2}}}) {
    ThreadWorld world(layout);
    std::atomic<int> mismatches{0};
    world.run([&](int rank, Engine& engine) {
      for (int step = 0; step < 5; ++step) {
        std::vector<float> good(10, 1);
        engine.wait(engine.submit(allreduce("x", good)));
        std::vector<float> odd(rank == 2 ? 11 : 10, 1);
        try {
          engine.wait(engine.submit(allreduce("x", odd)));
        } catch (const Failure& failure) {
          mismatches += failure.error().code == ErrorCode::kRankMismatch &&
                        failure.error().message.find("rank 2 sent") != std::string::npos;
        }
      }
    });
    CHECK(mismatches == 15);
    world.shutdown();
  }
}

TEST_CASE("several threads of each rank wait at the same time") {
  ThreadWorld world(one_host(2));
  std::atomic<int> wrong{0};
  world.run([&](int rank, Engine& engine) {
    std::vector<std::thread> threads;
    for (int t = 0; t < 4; ++t) {
      threads.emplace_back([&, t] {
        for (int step = 0; step < 200; ++step) {
          auto v = values(rank, 100);
          engine.wait(engine.submit(allreduce("thread" + std::to_string(t), v), step % 2 == 0));
          wrong += !is_sum(v, 2);
        }
      });
    }
    for (auto& thread : threads) thread.join();
  });
  CHECK(wrong == 0);
  world.shutdown();
}

TEST_CASE("a completion callback may submit, and wait") {
  ThreadWorld world(one_host(2));
  world.run([](int rank, Engine& engine) {
    auto first = values(rank, 50);
    auto second = values(rank, 60);
    auto third = values(rank, 70);
    OperationPtr chained;
    std::atomic<bool> called{false};
    Submission s = allreduce("first", first);
    s.done = [&](const Error* error) {
      REQUIRE(error == nullptr);
      chained = engine.submit(allreduce("second", second));
      engine.wait(engine.submit(allreduce("third", third), true));
      called = true;
    };
    engine.wait(engine.submit(std::move(s)));
    while (!called) std::this_thread::yield();
    engine.wait(chained);
    CHECK(is_sum(second, 2));
    CHECK(is_sum(third, 2));
  });
  world.shutdown();
}

// The engine's own thread is at times just about to look, and then does it; and a thread
// that was suspended for long counts as one that lent itself in vain. Neither is the rule.
TEST_CASE("a small operation is done in the thread that submits it and lends itself") {
  ThreadWorld world(one_host(1));
  world.run([](int rank, Engine& engine) {
    int done_here = 0;
    for (int i = 0; i < 10000 && done_here < 100; ++i) {
      auto v = values(rank, 50);
      std::atomic<std::thread::id> done_by{};
      Submission s = allreduce("small", v);
      s.done = [&](const Error* error) {
        REQUIRE(error == nullptr);
        done_by = std::this_thread::get_id();
      };
      if (engine.submit_lending(std::move(s))) engine.lend();
      while (done_by.load() == std::thread::id{}) std::this_thread::yield();
      if (done_by.load() == std::this_thread::get_id()) ++done_here;
      CHECK(is_sum(v, 1));
    }
    CHECK(done_here == 100);
    CHECK(engine.counters().at("lent") > 0);
  });
  world.shutdown();
}

TEST_CASE("ranks that lend their threads get the sums, whoever drives in the end") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      for (int i = 0; i < 200; ++i) {
        auto v = values(rank, 50);
        std::atomic<bool> done{false};
        Submission s = allreduce("small", v);
        s.done = [&](const Error* error) {
          if (error != nullptr) ++wrong;
          done = true;
        };
        if (engine.submit_lending(std::move(s))) engine.lend();
        while (!done) std::this_thread::yield();
        if (!is_sum(v, engine_count(layout))) ++wrong;
      }
    });
    CHECK(wrong == 0);
    world.shutdown();
  }
}

TEST_CASE("a thread that lends itself is free again while another rank is late") {
  ThreadWorld world(one_host(2));
  std::atomic<int> returned{0};  // the last round in which rank 0 has its thread back
  std::atomic<int> lent_in{-1};  // the first in which the engine's own thread was not at work
  world.run([&](int rank, Engine& engine) {
    for (int round = 1; round <= 100 && lent_in != round - 1; ++round) {
      auto v = values(rank, 50);
      std::atomic<bool> done{false};
      Submission s = allreduce("small", v);
      s.done = [&](const Error*) { done = true; };
      while (rank == 1 && returned < round) std::this_thread::yield();
      if (engine.submit_lending(std::move(s))) engine.lend();
      if (rank == 0) {
        CHECK(!done);
        if (engine.counters().at("lent_in_vain") == 1) lent_in = round;
        returned = round;
      }
      while (!done) std::this_thread::yield();
      CHECK(is_sum(v, 2));
    }
  });
  CHECK(lent_in > 0);
  world.shutdown();
}

TEST_CASE("no thread is lent for a large operation, nor for one that is not alone") {
  ThreadWorld world(one_host(2));
  world.run([](int rank, Engine& engine) {
    const auto submit = [&](const char* name, std::vector<float>& v, std::atomic<int>& done) {
      Submission s = allreduce(name, v);
      s.done = [&](const Error*) { ++done; };
      return engine.submit_lending(std::move(s));
    };
    std::atomic<int> done{0};
    auto large = values(rank, Engine::kLendBytesMax);
    CHECK(!submit("large", large, done));
    while (done < 1) std::this_thread::yield();
    if (rank == 0) {  // the other rank comes later: both are in flight here
      auto first = values(rank, 50);
      auto second = values(rank, 50);
      auto third = values(rank, 50);
      const OperationPtr pending = engine.submit(allreduce("first", first));
      CHECK(!submit("second", second, done));
      engine.wait(engine.submit(allreduce("go", third), true));
      engine.wait(pending);
      while (done < 2) std::this_thread::yield();
    } else {
      auto first = values(rank, 50);
      auto second = values(rank, 50);
      auto third = values(rank, 50);
      engine.wait(engine.submit(allreduce("go", third), true));
      engine.wait(engine.submit(allreduce("first", first), true));
      engine.wait(engine.submit(allreduce("second", second), true));
    }
  });
  world.shutdown();
}

TEST_CASE("an engine may be shut down while threads lend themselves to it") {
  ThreadWorld world(one_host(2));
  world.run([](int rank, Engine& engine) {
    std::atomic<int> calls{0};
    std::thread lender([&] {
      try {
        for (;;) {
          auto v = values(rank, 50);
          std::atomic<bool> done{false};
          Submission s = allreduce("small", v);
          s.done = [&](const Error*) { done = true; };
          if (engine.submit_lending(std::move(s))) engine.lend();
          while (!done) std::this_thread::yield();
          ++calls;
        }
      } catch (const Failure&) {  // of a later call: the engine is closed
      }
    });
    while (calls < 20) std::this_thread::yield();
    engine.shutdown();
    lender.join();
  });
}

TEST_CASE("a bad call fails at submit and disturbs nothing") {
  ThreadWorld world(one_host(2));
  world.run([](int rank, Engine& engine) {
    std::vector<float> v(10, 1), w(10, 1);
    const auto fails = [&](Submission s) {
      try {
        engine.submit(std::move(s));
      } catch (const Failure& failure) {
        return failure.error().code == ErrorCode::kInvalidArgument;
      }
      return false;
    };
    OperationPtr pending;
    if (rank == 0) {  // rank 1 asks later, so that it stays in flight
      pending = engine.submit(allreduce("x", v));
      CHECK(fails(allreduce("x", w)));            // name in flight
      CHECK(fails(allreduce("overlapping", v)));  // memory in flight
    }
    CHECK(fails(allreduce("", w)));
    CHECK(fails(allreduce("y", w, ReduceOp::kSum, 9)));
    engine.wait(engine.submit(allreduce("z", w)));
    if (rank == 1) pending = engine.submit(allreduce("x", v));
    engine.wait(pending);
    CHECK(v[0] == 2);
  });
  world.shutdown();
}

TEST_CASE("a rank that leaves in good order fails only those who still need it") {
  for (const Layout& layout : {Layout{{0, 1, 2}}, Layout{{0}, {1, 2}}}) {
    for (const int leaver : {0, 2}) {
      CAPTURE(leaver);
      ThreadWorld world(layout);
      std::atomic<int> reported{0};
      world.run([&](int rank, Engine& engine) {
        std::vector<float> v(10, 1);
        engine.wait(engine.submit(allreduce("x", v)));
        if (rank == leaver) {
          engine.shutdown();
          return;
        }
        try {
          engine.wait(engine.submit(allreduce("x", v)));
        } catch (const Failure& failure) {
          reported += failure.error().code == ErrorCode::kPeerDeparted;
          if (failure.error().code != ErrorCode::kPeerDeparted) MESSAGE(failure.error().message);
        }
      });
      CHECK(reported == 2);
      world.shutdown();
    }
  }
}

TEST_CASE("a rank may leave as soon as its own part of the last operation is done") {
  for (const Layout& layout : kLayouts) {
    CAPTURE(text_of(layout));
    for (int repeat = 0; repeat < 20; ++repeat) {
      ThreadWorld world(layout);
      std::atomic<int> wrong{0};
      world.run([&](int rank, Engine& engine) {
        auto v = values(rank, 100'000);
        engine.wait(engine.submit(allreduce("last", v)));
        engine.shutdown();
        wrong += !is_sum(v, world.size());
      });
      CHECK(wrong == 0);
    }
  }
}

TEST_CASE("a rank that leaves with an operation pending fails it on all, as one that has left") {
  for (const Layout& layout : {Layout{{0, 1, 2}}, Layout{{0}, {1, 2}}}) {
    ThreadWorld world(layout);
    std::atomic<int> reported{0};
    world.run([&](int rank, Engine& engine) {
      std::vector<float> v(10, 1);
      const bool leaves = rank == 1;
      try {  // the others may hear of it before they submit
        const auto operation = engine.submit(allreduce(leaves ? "never" : "too late", v));
        if (leaves) engine.shutdown();
        engine.wait(operation);
      } catch (const Failure& failure) {
        reported +=
            failure.error().code == (leaves ? ErrorCode::kShutdown : ErrorCode::kPeerDeparted);
      }
    });
    CHECK(reported == 3);
    world.shutdown();
  }
}

TEST_CASE("the last words of a rank that leaves are the reason for whoever needs it") {
  for (const Layout& layout : {Layout{{0, 1, 2}}, Layout{{0, 1}, {2, 3}}, Layout{{0}, {1}, {2}}}) {
    const int size = static_cast<int>(layout.back().back()) + 1;
    for (int leaver = 0; leaver < size; ++leaver) {
      for (const bool is_pending : {false, true}) {
        CAPTURE(text_of(layout));
        CAPTURE(leaver);
        CAPTURE(is_pending);
        ThreadWorld world(layout);
        std::atomic<int> met{0};
        std::atomic<int> reported{0};
        const std::string reason =
            "rank " + std::to_string(leaver) + " has failed: ValueError: bad row";
        world.run([&](int rank, Engine& engine) {
          std::vector<float> v(10, 1);
          engine.wait(engine.submit(allreduce("x", v)));
          ++met;
          while (met < size) std::this_thread::yield();
          OperationPtr pending;
          if (rank == leaver) {
            if (is_pending) pending = engine.submit(allreduce("y", v));
            engine.shutdown("has failed: ValueError: bad row");
            return;
          }
          for (int again = 0; again < 2; ++again) {  // waiting, and when it is known
            try {
              engine.wait(engine.submit(allreduce("x", v)));
            } catch (const Failure& failure) {
              CHECK(failure.error().code == ErrorCode::kPeerDeparted);
              const bool has_reason = failure.error().message.ends_with(reason);
              if (!has_reason) MESSAGE(failure.error().message);
              reported += has_reason;
            }
          }
        });
        CHECK(reported == 2 * (size - 1));
        world.shutdown();
      }
    }
  }
}

TEST_CASE(
    "a coordinating rank that leaves because another has failed says why, not that it has ended") {
  ThreadWorld world(Layout{{0, 1, 2}});
  std::atomic<bool> gone{false};
  world.run([&](int rank, Engine& engine) {
    std::vector<float> v(10, 1);
    engine.wait(engine.submit(allreduce("x", v)));
    if (rank == 1) engine.shutdown("has failed: ValueError: bad row");
    if (rank == 2) {
      while (!gone) std::this_thread::yield();
    }
    if (rank == 1) return;
    try {
      engine.wait(engine.submit(allreduce("x", v)));
      CHECK(false);
    } catch (const Failure& failure) {
      CHECK(failure.error().message == "allreduce 'x': rank 1 has failed: ValueError: bad row");
    }
    if (rank == 0) {
      engine.shutdown();
      gone = true;
    }
  });
  world.shutdown();
}

TEST_CASE("last words are cut where they are too long") {
  ThreadWorld world(Layout{{0, 1}});
  world.run([&](int rank, Engine& engine) {
    std::vector<float> v(10, 1);
    if (rank == 1) {
      engine.shutdown(std::string(2 * kLastWordsBytesMax, 'x'));
      return;
    }
    try {
      engine.wait(engine.submit(allreduce("x", v)));
      CHECK(false);
    } catch (const Failure& failure) {
      CHECK(failure.error().message ==
            "allreduce 'x': rank 1 " + std::string(kLastWordsBytesMax, 'x'));
    }
  });
  world.shutdown();
}

TEST_CASE("when one rank aborts, every pending operation of every rank fails with the reason") {
  for (const Layout& layout : {Layout{{0, 1, 2}}, Layout{{0, 1}, {2, 3}}, Layout{{0}, {1}, {2}}}) {
    ThreadWorld world(layout);
    std::atomic<int> reported{0};
    world.run([&](int rank, Engine& engine) {
      std::vector<float> v(100'000, 1);
      if (rank == 1) {
        engine.wait(engine.submit(allreduce("x", v)));
        engine.abort("a test");
        return;
      }
      try {
        for (;;) engine.wait(engine.submit(allreduce("x", v)));
      } catch (const Failure& failure) {
        reported += failure.error().code == ErrorCode::kPeerLost &&
                    failure.error().message.find("a test") != std::string::npos;
      }
    });
    CHECK(reported == world.size() - 1);
    world.shutdown();
  }
}

TEST_CASE("an engine that cannot be made closes its connections") {
  const std::function<void(Connections&)> faults[] = {
      [](Connections& c) { REQUIRE(ftruncate(c.segment_fd, 1) == 0); },
      [](Connections& c) { c.process_sets.assign(kProcessSetsMax, {0}); },
      [](Connections& c) { c.backends = {"nothing"}; },
  };
  for (const auto& fault : faults) {
    CAPTURE(&fault - faults);
    Connections connections;
    connections.size = 3;
    connections.domains = {{0, 1}, {2}};
    connections.labels.assign(3, "a thread");
    std::vector<int> others;
    const auto connect = [&](std::map<int, int>& fds, int rank) {
      int pair[2];
      REQUIRE(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0);
      fds[rank] = pair[0];
      others.push_back(pair[1]);
    };
    connect(connections.local_fds, 1);
    connect(connections.control_fds, 2);
    connect(connections.data_fds, 2);
    connections.control_keys[2] = connections.data_keys[2] = {};
    const int segment = memfd_create("polyhvd-test", MFD_CLOEXEC);
    REQUIRE(ftruncate(segment, static_cast<off_t>(shm::Segment::bytes(2))) == 0);
    connections.segment_fd = segment;
    fault(connections);
    CHECK_THROWS_AS(make_engine(std::move(connections), {}), Failure);
    CHECK(fcntl(segment, F_GETFD) == -1);
    for (const int other : others) {
      char byte;
      CHECK(recv(other, &byte, 1, MSG_DONTWAIT) == 0);  // the end of the stream
      close(other);
    }
  }
}

TEST_CASE("a rank without memory for a result fails the operation, whichever thread drives it") {
  for (const bool waits : {true, false}) {
    CAPTURE(waits);
    ThreadWorld world(one_host(2));
    std::atomic<int> reported{0};
    world.run([&](int rank, Engine& engine) {
      auto v = values(rank, 10);
      Submission s = allreduce("x", v);
      s.kind = OpKind::kAllgather;
      s.outputs.clear();
      if (rank == 1) {
        s.allocate = [](int, const Shape&) -> void* { throw std::bad_alloc(); };
      }
      const OperationPtr operation = engine.submit(std::move(s), waits);
      // Then the engine's own thread drives.
      while (!waits && !operation->is_finished()) std::this_thread::yield();
      try {
        engine.wait(operation);
      } catch (const Failure& failure) {
        reported += failure.error().code == ErrorCode::kInternal &&
                    failure.error().message.find("no memory on rank 1 for allgather 'x'; ") !=
                        std::string::npos;
      }
    });
    CHECK(reported == 2);
    world.shutdown();
  }
}

TEST_CASE("submissions of one name queue up when they are allowed to") {
  ThreadWorld world(one_host(2));
  std::atomic<int> wrong{0};
  world.run([&](int rank, Engine& engine) {
    std::vector<std::vector<float>> tensors;
    std::vector<OperationPtr> operations;
    for (std::size_t i = 0; i < 20; ++i) tensors.push_back(values(rank, i + 1));
    for (auto& tensor : tensors) {
      Submission s = allreduce("same", tensor);
      s.queue_duplicates = true;
      operations.push_back(engine.submit(std::move(s)));
    }
    for (const auto& operation : operations) engine.wait(operation);
    for (const auto& tensor : tensors) wrong += !is_sum(tensor, 2);
  });
  CHECK(wrong == 0);
  world.shutdown();
}

TEST_CASE("a rank that has joined stands in for a name of which it still executes its own") {
  ThreadWorld world(Layout{{0}, {1}});
  std::atomic<bool> rank_0_is_done{false};
  const auto wait_for_rank_0 = [&] {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::minutes(2);
    while (!rank_0_is_done && std::chrono::steady_clock::now() < deadline) sched_yield();
    CHECK(rank_0_is_done.load());
  };
  const auto broadcast = [](std::vector<float>& tensor) {
    Submission s = allreduce("b", tensor);
    s.kind = OpKind::kBroadcast;
    s.root = 0;
    return s;
  };
  const auto without_tensors = [](OpKind kind, const char* name) {
    Submission s;
    s.kind = kind;
    s.name = name;
    return s;
  };
  std::vector<float> received(100);
  world.run([&](int rank, Engine& engine) {
    Submission gate = without_tensors(OpKind::kBarrier, "gate");
    if (rank == 1) {
      // Its driver is held up, so that it hears of all that rank 0 does at once.
      gate.done = [&](const Error*) { wait_for_rank_0(); };
      engine.submit(broadcast(received));
      engine.submit(std::move(gate));
      return engine.wait(engine.submit(without_tensors(OpKind::kJoin, "join")));
    }
    // Only once rank 1 has joined, which it could not do in the gate.
    engine.wait(engine.submit(without_tensors(OpKind::kBarrier, "after the join")));
    engine.wait(engine.submit(std::move(gate)));
    for (const float round : {1.0f, 2.0f, 3.0f}) {
      std::vector<float> sent(100, round);
      engine.wait(engine.submit(broadcast(sent)));
    }
    rank_0_is_done = true;
    engine.wait(engine.submit(without_tensors(OpKind::kJoin, "join")));
  });
  CHECK(received == std::vector<float>(100, 1.0f));
  world.shutdown();
}

TEST_CASE("an engine without a cache works") {
  ThreadWorld world(one_host(3), {}, [](EngineOptions& o) { o.coordinator.cache_capacity = 0; });
  std::atomic<int> wrong{0};
  world.run([&](int rank, Engine& engine) {
    for (int step = 0; step < 20; ++step) {
      auto v = values(rank, 100);
      engine.wait(engine.submit(allreduce("x", v)));
      wrong += !is_sum(v, 3);
    }
  });
  CHECK(wrong == 0);
  world.shutdown();
}

TEST_CASE("a stall is reported with what each absent rank has done last, over any layout") {
  for (const Layout& layout : kLayouts) {
    if (layout.size() == 1 && layout[0].size() == 1) continue;
    CAPTURE(text_of(layout));
    std::mutex mutex;
    std::condition_variable reported;
    std::string report;
    ThreadWorld world(layout, {}, [&](EngineOptions& o) {
      o.stalls.warn = std::chrono::milliseconds(100);
      o.log = [&](const std::string& text) {
        std::lock_guard lock(mutex);
        report = text;
        reported.notify_all();
      };
    });
    world.run([&](int rank, Engine& engine) {
      std::vector<float> v(10);
      engine.wait(engine.submit(allreduce("before", v)));
      if (rank == world.size() - 1) {
        std::unique_lock lock(mutex);
        reported.wait_for(lock, std::chrono::minutes(2), [&] { return !report.empty(); });
      }
      engine.wait(engine.submit(allreduce("late", v)));
    });
    const std::string last = std::to_string(world.size() - 1);
    std::lock_guard lock(mutex);
    CAPTURE(report);
    CHECK(report.find(" for rank " + last + " in 1 operation:\n    'late', for ") !=
          std::string::npos);
    CHECK(report.find("rank " + last +
                      " (a thread): alive; it last ran allreduce 'before'; it has submitted "
                      "nothing since") != std::string::npos);
    world.shutdown();
  }
}

TEST_CASE("a stall that ends the job is explained in every rank's error") {
  for (const Layout& layout : {Layout{{0, 1, 2}}, Layout{{0, 1}, {2}}}) {
    CAPTURE(text_of(layout));
    ThreadWorld world(layout, {}, [](EngineOptions& o) {
      o.stalls.warn = std::chrono::seconds(0);
      o.stalls.shutdown = std::chrono::milliseconds(100);
    });
    std::atomic<int> reported{0};
    world.run([&](int rank, Engine& engine) {
      std::vector<float> v(10);
      if (rank == 1) return;
      try {
        engine.wait(engine.submit(allreduce("late", v)));
      } catch (const Failure& failure) {
        reported += failure.error().code == ErrorCode::kTimeout &&
                    failure.error().message.find(
                        "rank 1 (a thread): alive; it has run no operation") != std::string::npos;
      }
    });
    CHECK(reported == 2);
    world.shutdown();
  }
}

TEST_CASE("a join tells a native adapter which rank was the last") {
  ThreadWorld world(one_host(3));
  std::array<std::int32_t, 3> last{-1, -1, -1};
  world.run([&](int rank, Engine& engine) {
    if (rank == 1) {  // done when the other ranks have joined
      auto v = values(rank, 5);
      engine.wait(engine.submit(allreduce("alone", v), true));
    }
    Submission join;
    join.kind = OpKind::kJoin;
    join.name = "join";
    join.allocate = [&](int, const Shape&) { return &last[static_cast<std::size_t>(rank)]; };
    engine.wait(engine.submit(std::move(join), true));
  });
  CHECK(last == std::array<std::int32_t, 3>{1, 1, 1});
  world.shutdown();
}

TEST_CASE("an engine that is behind broadcasts and waits at barriers without the other ranks") {
  ThreadWorld world(one_host(2));
  Engine& engine = world.engine(1);
  engine.set_behind(true);
  auto v = values(1, 100);
  Submission in_place = allreduce("x", v);
  in_place.kind = OpKind::kBroadcast;
  in_place.root = 0;
  Submission apart = in_place;
  apart.outputs.clear();
  bool reported = false;
  apart.done = [&reported](const Error* error) { reported = error == nullptr; };
  engine.wait(engine.submit(std::move(in_place)));
  CHECK(v == values(1, 100));
  const OperationPtr made = engine.submit(std::move(apart));
  engine.wait(made);
  CHECK(reported);
  CHECK(std::memcmp(made->buffers.at(0)->data(), v.data(), v.size() * sizeof v[0]) == 0);
  Submission barrier;
  barrier.kind = OpKind::kBarrier;
  leave_unnamed(barrier);
  engine.wait(engine.submit(std::move(barrier)));
  world.shutdown();
}

TEST_CASE("an engine that is behind refuses what needs other ranks, with the line and the cure") {
  ThreadWorld world(one_host(2));
  Engine& engine = world.engine(1);
  engine.set_behind(true);
  auto v = values(1, 100);
  const auto where = [] { return std::string("train.py:7"); };
  for (const OpKind kind : {OpKind::kAllreduce, OpKind::kAllgather, OpKind::kAlltoall,
                            OpKind::kReducescatter, OpKind::kJoin, OpKind::kAddProcessSet}) {
    Submission s = allreduce("x", v);
    s.kind = kind;
    if (!has_tensors(kind)) s.inputs.clear();
    if (kind != OpKind::kAllreduce) s.outputs.clear();
    std::string text;
    try {
      engine.submit(std::move(s), false, where);
    } catch (const Failure& failure) {
      CHECK(failure.error().code == ErrorCode::kInvalidArgument);
      text = failure.error().message;
    }
    CAPTURE(text);
    CHECK(text.find("at train.py:7: rank 1 joined an elastic job that is running") !=
          std::string::npos);
  }
  world.shutdown();
}

TEST_CASE("calls without a name that an engine makes while it is behind do not count") {
  ThreadWorld world(one_host(2));
  std::atomic<int> wrong{0};
  const auto received = [](Engine& engine, int rank) {
    auto v = values(rank, 10);
    Submission s = allreduce("", v);
    s.kind = OpKind::kBroadcast;
    s.root = 0;
    leave_unnamed(s);
    engine.wait(engine.submit(std::move(s)));
    return v;
  };
  world.run([&](int rank, Engine& engine) {
    if (rank == 1) {
      engine.set_behind(true);
      engine.take_turn(kWorld, OpKind::kBroadcast);
      received(engine, rank);
      engine.set_behind(false);
    }
    wrong += received(engine, rank) != values(0, 10);
  });
  CHECK(wrong == 0);
  world.shutdown();
}
