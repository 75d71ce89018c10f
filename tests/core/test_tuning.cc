// What changes while a job runs: on all ranks alike, and no bit of any result.
#include <doctest/doctest.h>

#include <atomic>
#include <cstring>

#include "control/wire.h"
#include "observe/step_meter.h"
#include "thread_world.h"

using namespace polyhvd;
using namespace polyhvd::test;

namespace {

using std::chrono::milliseconds;

const StepMeter::Time kStart{};

// Sums of these depend on the order of the terms.
std::vector<float> cancelling(int rank, std::size_t count) {
  std::vector<float> v(count);
  for (std::size_t i = 0; i < count; ++i) {
    const float big = 1e8f + static_cast<float>(i % 31);
    v[i] = rank % 3 == 0 ? big : rank % 3 == 1 ? -big : 0.37f + static_cast<float>(i % 7);
  }
  return v;
}

}  // namespace

TEST_CASE("a sample covers whole steps, after one that is left out") {
  StepMeter meter(2);
  CHECK(!meter.note("a", 1, kStart));
  meter.restart();
  std::optional<StepSample> sample;
  int ms = 0;
  const auto step = [&] {
    for (const char* name : {"a", "b", "c"}) {
      sample = meter.note(name, 100, kStart + milliseconds(ms++));
      if (sample) return;
    }
  };
  meter.note("c", 5, kStart);  // the middle of a step
  for (int i = 0; i < 10 && !sample; ++i) step();
  REQUIRE(sample);
  CHECK(sample->steps == 2);
  CHECK(sample->bytes == 600);
  CHECK(sample->seconds == doctest::Approx(0.006));
  const std::uint64_t fingerprint = sample->fingerprint;
  CHECK(!meter.note("a", 100, kStart));  // nothing until it is resumed

  meter.restart();
  sample.reset();
  meter.note("b", 100, kStart);  // begins elsewhere in the step: the same operations
  for (int i = 0; i < 10 && !sample; ++i) step();
  REQUIRE(sample);
  CHECK(sample->fingerprint == fingerprint);
}

TEST_CASE("other operations have another fingerprint") {
  const auto fingerprint = [](const char* name, std::size_t bytes) {
    StepMeter meter(1);
    meter.restart();
    std::optional<StepSample> sample;
    for (int i = 0; i < 3 && !sample; ++i) sample = meter.note(name, bytes, kStart);
    return sample.value().fingerprint;
  };
  CHECK(fingerprint("a", 8) == fingerprint("a", 8));
  CHECK(fingerprint("a", 8) != fingerprint("a", 16));
  CHECK(fingerprint("a", 8) != fingerprint("b", 8));
}

TEST_CASE("an operation that never comes again does not begin a step for long") {
  for (const int operations : {1, 60, 200, 3000}) {
    CAPTURE(operations);
    StepMeter meter(2);
    meter.restart();
    meter.note("only once", 1, kStart);
    std::optional<StepSample> sample;
    int noted = 0;
    for (; noted < 20 * operations + 1000 && !sample; ++noted) {
      sample = meter.note("x" + std::to_string(noted % operations), 1, kStart);
    }
    REQUIRE(sample);
    CHECK(sample->bytes == 2 * static_cast<std::uint64_t>(operations));
    CHECK(noted <= 100 + 8 * operations);
  }
}

TEST_CASE("a tuning survives the wire") {
  const Tuning before{1u << 30, 77, 4096, 8192};
  std::string payload;
  encode(before, payload);
  CHECK(type_of(payload) == MessageType::kTuning);
  CHECK(decode_tuning(payload) == before);
  CHECK_THROWS_AS(decode_tuning(payload + "x"), Failure);
  CHECK_THROWS_AS(decode_tuning(std::string_view(payload).substr(0, payload.size() - 1)), Failure);
}

TEST_CASE("all ranks take up a tuning, and the same bits come out of all of them") {
  const std::vector<Tuning> tunings = {
      {1u << 20, 0, 4096, 0}, {1u << 28, 5000, 128 << 10, 512 << 10}, {4096, 200, 1, 1 << 12},
      {0, 0, 16 << 10, ~0u},  {~0ull, 1, 100'000, 128u << 10},
  };
  for (const Layout& layout : {Layout{{0, 1, 2}}, Layout{{0, 1}, {2, 3}}, Layout{{0}, {1}, {2}}}) {
    ThreadWorld world(layout);
    std::atomic<int> wrong{0};
    world.run([&](int rank, Engine& engine) {
      const auto sums = [&] {
        std::vector<std::vector<float>> tensors;
        std::vector<OperationPtr> operations;
        for (const std::size_t count : {3u, 700u, 9000u, 50'000u, 120'001u}) {
          tensors.push_back(cancelling(rank, count));
        }
        for (std::size_t i = 0; i < tensors.size(); ++i) {
          operations.push_back(engine.submit(allreduce("t" + std::to_string(i), tensors[i])));
        }
        for (const OperationPtr& operation : operations) engine.wait(operation);
        return tensors;
      };
      const auto expected = sums();
      for (const Tuning& tuning : tunings) {
        if (rank == 0) engine.tune(tuning);
        for (int i = 0; i < 3; ++i) {
          const auto found = sums();
          for (std::size_t t = 0; t < found.size(); ++t) {
            const std::size_t bytes = found[t].size() * sizeof(float);
            wrong += std::memcmp(found[t].data(), expected[t].data(), bytes) != 0;
          }
        }
        wrong += !(engine.tuning() == tuning);
        std::vector<float> all(1);  // have looked
        engine.wait(engine.submit(allreduce("looked", all), true));
      }
    });
    CHECK(wrong == 0);
  }
}

TEST_CASE("only rank 0 tunes") {
  ThreadWorld world(one_host(2));
  CHECK_THROWS_AS(world.engine(1).tune({}), Failure);
}

TEST_CASE("the root posts samples, a new one after each tuning") {
  const auto mailbox = std::make_shared<Mailbox>();
  ThreadWorld world(one_host(2), {}, [&](EngineOptions& options) {
    options.mailbox = mailbox;
    options.steps_per_sample = 3;
  });
  std::atomic<int> samples{0};
  world.engine(0).tune({});
  world.run([&](int rank, Engine& engine) {
    for (int step = 0; step < 40; ++step) {
      std::vector<float> v(100, 1.0f), w(20, 1.0f);
      engine.wait(engine.submit(allreduce("v", v), true));
      engine.wait(engine.submit(allreduce("w", w), true));
      if (rank != 0) continue;
      if (const auto sample = mailbox->take_sample()) {
        ++samples;
        CHECK(sample->steps == 3);
        CHECK(sample->bytes == 3 * 480);
        engine.tune({128 << 20, static_cast<std::uint32_t>(step), 65536, 65536});
      }
    }
  });
  CHECK(samples >= 5);
}
