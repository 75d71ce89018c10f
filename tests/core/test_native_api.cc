// The C table that native adapters submit through, between ranks that are threads.
#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <future>
#include <string>

#include "api/native_api.h"
#include "thread_world.h"

using namespace polyhvd;
using namespace polyhvd::test;

namespace {

constexpr std::uint64_t kGeneration = 3;

struct Outcome {
  int code = 0;
  std::string message;
};

// A sum of four floats in place, and what becomes of it.
struct Call {
  explicit Call(float value) {
    data.fill(value);
    submission.size = sizeof submission;
    submission.kind = static_cast<std::int32_t>(OpKind::kAllreduce);
    submission.op = static_cast<std::int32_t>(ReduceOp::kSum);
    submission.name = "sum";
    submission.root = -1;
    submission.prescale = submission.postscale = 1;
    submission.inputs = submission.outputs = &tensor;
    submission.count = 1;
    submission.generation = kGeneration;
    submission.context = &done;
    submission.done = [](void* context, std::int32_t code, const char* message) {
      static_cast<std::promise<Outcome>*>(context)->set_value(
          {code, message == nullptr ? "" : message});
    };
  }
  Outcome submit(const NativeApi& api) {
    std::array<char, 512> text{};
    const auto& table = api.table();
    const int code = table.submit(table.engine, &submission, text.data(), text.size());
    return {code, text.data()};
  }
  Outcome wait() { return done.get_future().get(); }

  std::array<float, 4> data{};
  std::int64_t shape = 4;
  polyhvd_tensor tensor{data.data(), &shape, 1, static_cast<std::int32_t>(DType::kFloat32), 0, 0};
  polyhvd_submission submission{};
  std::promise<Outcome> done;
};

// What a submission is refused with that `spoil` has changed.
std::string refusal_of(const std::function<void(Call&)>& spoil) {
  std::string message;
  ThreadWorld world(one_host(1));
  world.run([&](int, Engine& engine) {
    const NativeApi api(engine, kGeneration);
    Call call(1);
    spoil(call);
    const Outcome outcome = call.submit(api);
    CHECK(outcome.code == static_cast<int>(ErrorCode::kInvalidArgument));
    message = outcome.message;
    Call next(2);  // and nothing was left behind
    REQUIRE(next.submit(api).code == 0);
    CHECK(next.wait().code == 0);
  });
  world.shutdown();
  return message;
}

bool says(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("a submission through the C table is done on every rank") {
  ThreadWorld world(one_host(2));
  world.run([](int rank, Engine& engine) {
    const NativeApi api(engine, kGeneration);
    CHECK(api.table().version == POLYHVD_C_API_VERSION);
    CHECK(api.table().size == sizeof(polyhvd_engine_api));
    CHECK(api.table().generation == kGeneration);
    Call call(static_cast<float>(rank + 1));
    std::int32_t lends = 0;
    call.submission.lends = &lends;
    REQUIRE(call.submit(api).code == 0);
    if (lends != 0) api.table().lend(api.table().engine);
    CHECK(call.wait().code == 0);
    CHECK(call.data[3] == 3);
  });
  world.shutdown();
}

TEST_CASE("a submission of another version of the C interface is refused") {
  for (const std::uint32_t size : {0U, 8U, static_cast<unsigned>(sizeof(polyhvd_submission)) + 8}) {
    CHECK(says(refusal_of([&](Call& call) { call.submission.size = size; }), "another version"));
  }
  ThreadWorld world(one_host(1));
  world.run([](int, Engine& engine) {
    const NativeApi api(engine, kGeneration);
    CHECK(api.table().submit(api.table().engine, nullptr, nullptr, 0) != 0);
  });
  world.shutdown();
}

TEST_CASE("a submission without what it needs is refused, and harms nothing") {
  const auto null_shape = [](Call& call) { call.tensor.shape = nullptr; };
  const auto null_data = [](Call& call) { call.tensor.data = nullptr; };
  CHECK(says(refusal_of(null_shape), "without a shape"));
  CHECK(says(refusal_of(null_data), "without memory"));
  CHECK(says(refusal_of([](Call& call) { call.tensor.ndim = -1; }), "without a shape"));
  CHECK(says(refusal_of([](Call& call) { call.tensor.dtype = kDTypeCount; }), "no dtype 13"));
  CHECK(says(refusal_of([](Call& call) { call.tensor.device_kind = 2; }), "no kind of device 2"));
  CHECK(says(refusal_of([](Call& call) { call.submission.kind = -1; }), "no kind -1"));
  CHECK(says(refusal_of([](Call& call) { call.submission.op = 99; }), "no reduction 99"));
  CHECK(says(refusal_of([](Call& call) { call.submission.inputs = nullptr; }), "its inputs"));
  CHECK(says(refusal_of([](Call& call) { call.submission.count = -1; }), "its inputs"));
  CHECK(says(refusal_of([](Call& call) { call.submission.done = nullptr; }), "lacks done()"));
  CHECK(says(refusal_of([](Call& call) { call.submission.number_count = -1; }), "numbers"));
}

TEST_CASE("a stream or an event is unsupported with tensors of the host") {
  int anything = 0;
  for (void* polyhvd_submission::* field :
       {&polyhvd_submission::stream, &polyhvd_submission::event}) {
    const std::string text = refusal_of([&](Call& call) { call.submission.*field = &anything; });
    CHECK(says(text, "unsupported with tensors of the host"));
    CHECK(says(text, "'sum'"));
  }
}

TEST_CASE("a submission of another generation fails as lost") {
  ThreadWorld world(one_host(1));
  world.run([](int, Engine& engine) {
    const NativeApi api(engine, kGeneration);
    Call call(1);
    call.submission.generation = kGeneration - 1;
    const Outcome outcome = call.submit(api);
    CHECK(outcome.code == static_cast<int>(ErrorCode::kPeerLost));
    CHECK(says(outcome.message, "generation 2"));
    call.submission.generation = 0;  // whichever is current
    REQUIRE(call.submit(api).code == 0);
    CHECK(call.wait().code == 0);
  });
  world.shutdown();
}

namespace {

// A call whose outputs are made when their sizes are known, and the sizes that it was given.
struct SizedCall : Call {
  SizedCall(OpKind kind, std::int64_t rows, const std::vector<std::int64_t>& splits)
      : Call(1), numbers(splits) {
    shape = rows;
    submission.kind = static_cast<std::int32_t>(kind);
    submission.op = 0;
    submission.outputs = nullptr;
    submission.numbers = numbers.empty() ? nullptr : numbers.data();
    submission.number_count = static_cast<std::int32_t>(numbers.size());
    submission.context = this;
    submission.sized = [](void* self, const std::int64_t* sizes, std::int32_t count) {
      static_cast<SizedCall*>(self)->sizes.emplace_back(sizes, sizes + count);
    };
    submission.allocate = [](void* self, std::int32_t index, const std::int64_t*, std::int32_t) {
      auto& call = *static_cast<SizedCall*>(self);
      CHECK(call.sizes.size() == 1);  // before memory is asked for
      return static_cast<void*>(call.memory[static_cast<std::size_t>(index)].data());
    };
    submission.done = [](void* self, std::int32_t code, const char* message) {
      static_cast<SizedCall*>(self)->done.set_value({code, message == nullptr ? "" : message});
    };
  }

  std::vector<std::int64_t> numbers;
  std::vector<std::vector<std::int64_t>> sizes;
  std::array<std::array<float, 16>, 2> memory{};
};

// The sizes that ranks 0 and 1 of three are given in a call that rank 2 does not make, as it has
// joined.
std::array<std::vector<std::int64_t>, 2> told_to_two(OpKind kind) {
  std::array<std::vector<std::int64_t>, 2> sizes;
  ThreadWorld world(one_host(3));
  world.run([&](int rank, Engine& engine) {
    if (rank < 2) {
      const NativeApi api(engine, kGeneration);
      const bool exchanges = kind == OpKind::kAlltoall;
      SizedCall call(kind, rank + 1,
                     exchanges ? std::vector<std::int64_t>{0, 1, 0} : std::vector<std::int64_t>{});
      REQUIRE(call.submit(api).code == 0);
      CHECK(call.wait().code == 0);
      REQUIRE(call.sizes.size() == 1);
      sizes[static_cast<std::size_t>(rank)] = call.sizes[0];
    }
    Submission join;
    join.kind = OpKind::kJoin;
    join.name = "join";
    engine.wait(engine.submit(std::move(join), true));
  });
  world.shutdown();
  return sizes;
}

}  // namespace

TEST_CASE("an allgather tells every member's rows before it asks for memory") {
  const auto sizes = told_to_two(OpKind::kAllgather);
  CHECK(sizes[0] == std::vector<std::int64_t>{1, 2, 0});
  CHECK(sizes[1] == sizes[0]);
}

TEST_CASE("an alltoall tells the rows that come from each member, and which one has joined") {
  const auto sizes = told_to_two(OpKind::kAlltoall);
  CHECK(sizes[0] == std::vector<std::int64_t>{0, 0, kNoRows});
  CHECK(sizes[1] == std::vector<std::int64_t>{1, 1, kNoRows});
}
