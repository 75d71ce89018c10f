// The ring of operations: what it keeps, and that it can be read at any time.
#include <doctest/doctest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "observe/flight.h"
#include "observe/recorder.h"
#include "observe/timeline_writer.h"
#include "thread_world.h"

using namespace polyhvd;
using namespace polyhvd::test;

namespace {

Operation operation_of(const std::string& name, std::int64_t elements = 1) {
  Submission s;
  s.name = name;
  s.inputs = {{nullptr, {elements}, DType::kInt64, {}}};
  return Operation(std::move(s));
}

// From submit to done, in batch `number`, which is also its size in elements.
void run_through(Recorder& recorder, std::int64_t number) {
  Operation operation = operation_of("op " + std::to_string(number), number);
  recorder.on_submit(operation);
  recorder.on_announce(operation, ticks_now());
  recorder.on_agreement(operation, static_cast<std::uint64_t>(number), 7, 2, ticks_now());
  recorder.on_start(operation, ticks_now());
  recorder.on_end(operation, OpState::kDone);
}

std::string only_name(const std::string& submitted) {
  Recorder recorder(4);
  Operation operation = operation_of(submitted);
  recorder.on_submit(operation);
  return std::string(recorder.snapshot().at(0).name.view());
}

// A folder of this test alone, removed with what is in it.
struct Folder {
  Folder() {
    std::string text = (std::filesystem::temp_directory_path() / "polyhvd-core-XXXXXX").string();
    path = mkdtemp(text.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::filesystem::path path;
};

std::string content(const std::filesystem::path& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

}  // namespace

TEST_CASE("a record follows its operation through the states") {
  Recorder recorder(4);
  Operation operation = operation_of("x", 3);
  Record record;
  const auto state = [&] {
    REQUIRE(recorder.read(operation, record));
    return record.state;
  };
  recorder.on_submit(operation);
  CHECK(state() == OpState::kSubmitted);
  CHECK(record.bytes == 24);
  CHECK(record.dtype == DType::kInt64);
  CHECK(record.batch == 0);
  recorder.on_announce(operation, ticks_now());
  CHECK(state() == OpState::kAnnounced);
  recorder.on_agreement(operation, 9, 7, 2, ticks_now());
  CHECK(state() == OpState::kAgreed);
  CHECK(record.batch == 9);
  CHECK(record.cache_id == 7);
  CHECK(record.fused == 2);
  recorder.on_start(operation, ticks_now());
  CHECK(state() == OpState::kRunning);
  recorder.on_end(operation, OpState::kDone);
  CHECK(state() == OpState::kDone);
  CHECK(std::ranges::is_sorted(record.times));
  CHECK(record.times[kAtSubmit] > 0);
}

TEST_CASE("a refused operation says so, without times that it has not reached") {
  Recorder recorder(4);
  Operation operation = operation_of("x");
  recorder.on_submit(operation);
  recorder.on_announce(operation, ticks_now());
  recorder.on_end(operation, OpState::kRefused);
  Record record;
  REQUIRE(recorder.read(operation, record));
  CHECK(record.state == OpState::kRefused);
  CHECK(record.times[kAtStart] == 0);
  CHECK(record.batch == 0);
}

TEST_CASE("a full ring keeps the newest operations, in order") {
  Recorder recorder(8);
  for (std::int64_t i = 1; i <= 3000; ++i) run_through(recorder, i);  // laps beyond their tag
  const std::vector<Record> records = recorder.snapshot();
  REQUIRE(records.size() == 8);
  for (std::size_t i = 0; i < 8; ++i) {
    CHECK(records[i].name.view() == "op " + std::to_string(2993 + i));
    CHECK(records[i].batch == 2993 + i);
    CHECK(records[i].state == OpState::kDone);
  }
}

TEST_CASE("an operation in flight outlives those that finish after it") {
  Recorder recorder(8);
  Operation stuck = operation_of("stuck");
  recorder.on_submit(stuck);
  recorder.on_announce(stuck, ticks_now());
  for (std::int64_t i = 1; i <= 100; ++i) run_through(recorder, i);
  const std::vector<Record> records = recorder.snapshot();
  CHECK(records.size() == 8);
  CHECK(records[0].name.view() == "stuck");
  CHECK(recorder.waiting_since(ticks_now()) == stuck.sequence);
  CHECK(recorder.waiting_since(records[0].times[kAtAnnounce]) == 0);
}

TEST_CASE("what comes too late for an overwritten operation is not recorded for the next one") {
  Recorder recorder(1);
  Operation first = operation_of("first");
  Operation second = operation_of("second");
  recorder.on_submit(first);
  recorder.on_submit(second);
  recorder.on_end(first, OpState::kFailed);
  Record record;
  CHECK_FALSE(recorder.read(first, record));
  REQUIRE(recorder.read(second, record));
  CHECK(record.state == OpState::kSubmitted);
}

TEST_CASE("of a long name the end is kept, whole characters of it") {
  CHECK(only_name(std::string(64, 'a')) == std::string(64, 'a'));
  CHECK(only_name("begin" + std::string(61, 'a')) == "..." + std::string(61, 'a'));
  // "é" is two bytes: half of the first one would be left.
  std::string accents;
  for (int i = 0; i < 40; ++i) accents += "\xc3\xa9";
  const std::string name = only_name(accents);
  CHECK(name.size() == 63);
  CHECK(name.substr(3, 2) == "\xc3\xa9");
}

TEST_CASE("the ring can be read while it is written") {
  Recorder recorder(16);
  std::atomic<bool> reading{true};
  std::thread writer([&] {
    for (std::int64_t i = 1; reading; ++i) run_through(recorder, i);
  });
  int torn = 0;
  int seen = 0;
  while (seen < 10'000) {  // however long it takes until both run at once
    for (const Record& record : recorder.snapshot()) {
      ++seen;
      torn += record.name.view() != "op " + std::to_string(record.bytes / 8);
      torn += record.batch != 0 && record.batch != record.bytes / 8;
      for (std::size_t i = 1; i < kMoments; ++i) {
        torn += record.times[i] != 0 && record.times[i] < record.times[i - 1];
      }
    }
  }
  reading = false;
  writer.join();
  CHECK(torn == 0);
}

TEST_CASE("no operation has waited for longer than the machine runs") {
  Folder folder;
  Recorder recorder;
  Operation waiting = operation_of("waiting");
  recorder.on_submit(waiting);
  recorder.on_announce(waiting, ticks_now());
  FlightDump dump(recorder, 0, {.root = folder.path.string(), .job = ""}, [](const std::string&) {},
                  {});
  dump.check_stall(std::chrono::hours(24 * 365 * 10));
  CHECK(dump.settle(std::chrono::seconds(60)));
  CHECK(std::filesystem::is_empty(folder.path));
  dump.check_stall(std::chrono::seconds(0));
  CHECK(dump.settle(std::chrono::seconds(60)));
  CHECK_FALSE(std::filesystem::is_empty(folder.path));
}

TEST_CASE("timelines and dumps of a busy world are whole, and name batches alike") {
  Folder folder;
  ThreadWorld world(one_host(2), {},
                    [&](EngineOptions& options) { options.flights.root = folder.path.string(); });
  std::array<std::vector<std::string>, 2> lines;
  world.run([&](int rank, Engine& engine) {
    TimelineOptions options;
    options.path = (folder.path / (std::to_string(rank) + ".json")).string();
    options.mark_cycles = true;
    std::thread dumping([&] {
      for (int i = 0; i < 20; ++i) engine.flight().write("a test");
    });
    for (int round = 0; round < 3; ++round) {
      engine.timeline().start(options);
      CHECK_THROWS_AS(engine.timeline().start(options), Failure);
      for (int step = 0; step < 30; ++step) {
        std::vector<float> a(1000, 1.0f), b(70'000, 2.0f);
        const auto first = engine.submit(allreduce("a" + std::to_string(step), a));
        engine.wait(engine.submit(allreduce("b", b)));
        engine.wait(first);
      }
      CHECK(engine.timeline().stop());
      CHECK_FALSE(engine.timeline().stop());
      CHECK(content(options.path).ends_with("}\n]\n"));
    }
    dumping.join();
    engine.flight().write("the end");
    CHECK(engine.flight().settle(std::chrono::seconds(60)));
  });
  for (int rank = 0; rank < 2; ++rank) {
    const auto name = "polyhvd-flight.rank" + std::to_string(rank) + "." + std::to_string(getpid());
    std::istringstream text(content(folder.path / (name + ".json")));
    for (std::string line; std::getline(text, line);) {
      const std::size_t from = line.find("\"kind\"");
      if (from == std::string::npos || line.find("\"state\":\"done\"") == std::string::npos)
        continue;
      lines[static_cast<std::size_t>(rank)].push_back(
          line.substr(from, line.find(",\"cache_id") - from));
    }
    std::ranges::sort(lines[static_cast<std::size_t>(rank)]);
  }
  CHECK(lines[0].size() == 180);
  CHECK(lines[0] == lines[1]);  // kind, name, bytes and batch
  world.shutdown();
}

TEST_CASE("a timeline goes on in the next world, whatever its engines do meanwhile") {
  Folder folder;
  std::array<std::unique_ptr<TimelineWriter>, 2> files;
  for (int generation = 1; generation <= 3; ++generation) {
    ThreadWorld world(one_host(2));
    world.run([&](int rank, Engine& engine) {
      auto& file = files[static_cast<std::size_t>(rank)];
      const std::string header = "{\"generation\":" + std::to_string(generation) + "}";
      TimelineOptions options;
      options.path = (folder.path / (std::to_string(rank) + ".json")).string();
      options.header = header;
      if (file == nullptr) {
        engine.timeline().start(options);
      } else {
        engine.timeline().take_over(std::move(file), header);
      }
      CHECK_THROWS_AS(engine.timeline().start(options), Failure);
      std::atomic<bool> done{false};
      std::thread handing_over([&] {  // in the middle of what runs
        while (!done) std::this_thread::yield();
        file = engine.timeline().hand_over();
      });
      for (int step = 0; step < 40; ++step) {
        std::vector<float> a(1000, 1.0f);
        engine.wait(engine.submit(allreduce("a", a)));
        if (step == 20) done = true;
      }
      handing_over.join();
      CHECK_FALSE(engine.timeline().stop());
    });
    world.shutdown();
  }
  for (const int rank : {0, 1}) {
    const std::string path = (folder.path / (std::to_string(rank) + ".json")).string();
    CHECK_FALSE(content(path).ends_with("]\n"));
    files[static_cast<std::size_t>(rank)].reset();
    const std::string text = content(path);
    CHECK(text.ends_with("}\n]\n"));
    const auto count_of = [&](const std::string& what) {
      std::size_t count = 0;
      for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; ++at) ++count;
      return count;
    };
    CHECK(count_of("\"polyhvd\"") == 3);
    CHECK(count_of("NEXT_WORLD") == 2);
    CHECK(count_of("\"thread_name\"") == 1);  // one row for the tensor
    CHECK(count_of("\"ALLREDUCE\"") >= 3 * 20);
  }
}
