// NCCL's backend: what it decides from what ranks say, and ranks that are threads on the
// stand-ins; under the sanitizers as well.
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <cstring>
#include <latch>
#include <numeric>
#include <string>

#include "../../backends/gpu/devices.h"
#include "../../backends/nccl/hierarchy.h"
#include "../../backends/nccl/offer.h"
#include "../../backends/nccl/reductions.h"
#include "thread_world.h"

using namespace polyhvd;
using namespace polyhvd::test;

namespace {

// For two hosts of two ranks. Read when the stand-in is loaded, by whichever test comes first.
[[maybe_unused]] const int g_devices = setenv("POLYHVD_STAND_IN_CUDA_DEVICES", "4", 1);

nccl::Offer offer_of(int version, const char* gpu, bool shares = false) {
  nccl::Offer offer;
  offer.version = version;
  offer.shares_gpus = shares ? 1 : 0;
  nccl::put(offer.gpu, gpu);
  nccl::put(offer.reason, "libnccl.so.2: not there");
  return offer;
}

std::string objection_to(const std::vector<nccl::Offer>& offers) {
  const auto name = [](std::size_t position) { return "rank " + std::to_string(10 * position); };
  return nccl::objection(offers, name).value_or("");
}

template <class T>
T factor_of(const std::optional<nccl::LibraryReduction>& reduction) {
  T factor;
  std::memcpy(&factor, reduction->factor->data(), sizeof factor);
  return factor;
}

// A vector of floats on this rank's GPU, and the stream that has it.
class OnGpu {
 public:
  OnGpu(int device, const std::vector<float>& values)
      : context_(gpu::Context::open(std::make_shared<gpu::Driver>(device), device)),
        stream_(context_),
        pinned_(context_, values.size() * sizeof(float)),
        memory_(context_->allocate(pinned_.bytes())) {
    std::memcpy(pinned_.data(), values.data(), pinned_.bytes());
    stream_.copy_to_device(memory_.get(), pinned_.data(), pinned_.bytes());
  }
  ~OnGpu() { stream_.drain(); }

  Submission allreduce(std::string name) const {
    Submission s;
    s.name = std::move(name);
    const auto count = static_cast<std::int64_t>(pinned_.bytes() / sizeof(float));
    s.inputs = {{memory_.get(), {count}, DType::kFloat32, {DeviceKind::kCuda, context_->device()}}};
    s.outputs = s.inputs;
    s.stream = stream_.get();
    return s;
  }
  std::vector<float> get() {
    stream_.copy_to_host(pinned_.data(), memory_.get(), pinned_.bytes());
    stream_.drain();
    std::vector<float> values(pinned_.bytes() / sizeof(float));
    std::memcpy(values.data(), pinned_.data(), pinned_.bytes());
    return values;
  }

 private:
  gpu::ContextPtr context_;
  gpu::OwnStream stream_;
  gpu::PinnedMemory pinned_;
  std::shared_ptr<std::byte> memory_;
};

// Loaded by one thread, as the thread sanitizer does not see the loader's locks.
void use_nccl(Connections& connections) {
  for (const char* name : {"build/gpu/libcuda.so.1", "build/gpu/libnccl.so.2"}) {
    REQUIRE_MESSAGE(dlopen(name, RTLD_NOW | RTLD_LOCAL) != nullptr, "make stand-ins builds it");
  }
  gpu::Driver(0).functions();
  connections.backends = {"nccl", "host"};
  connections.nccl_libraries = {"build/gpu/libnccl.so.2"};
}

}  // namespace

TEST_CASE("ranks with the same NCCL and a GPU each are connected") {
  CHECK(objection_to({offer_of(22809, "a"), offer_of(22809, "b")}).empty());
}

TEST_CASE("whatever stands in the way of NCCL is said of every rank that it concerns") {
  const std::string text = objection_to(
      {offer_of(22809, "a"), offer_of(0, ""), offer_of(22304, "b"), offer_of(22809, "a")});
  CHECK(text.find("rank 10 has no NCCL: libnccl.so.2: not there") != std::string::npos);
  CHECK(text.find("rank 20 has NCCL 2.23.4, and rank 0 2.28.9") != std::string::npos);
  CHECK(text.find("rank 0 and rank 30 use the same GPU (a)") != std::string::npos);
}

TEST_CASE("the text of another rank ends at the end of its array, even without a zero") {
  nccl::Offer none = offer_of(0, "");
  none.reason.fill('x');
  const std::string text = objection_to({none, offer_of(22809, "b")});
  CHECK(text == "rank 0 has no NCCL: " + std::string(256, 'x'));
  nccl::Offer same = offer_of(22809, "");
  same.gpu.fill('y');
  const std::string shown = "the same GPU (" + std::string(64, 'y') + ")";
  CHECK(objection_to({same, same}).find(shown) != std::string::npos);
}

TEST_CASE("ranks share a GPU only if all of them may and NCCL can") {
  CHECK(objection_to({offer_of(23001, "a", true), offer_of(23001, "a", true)}).empty());
  CHECK(!objection_to({offer_of(23001, "a", true), offer_of(23001, "a", false)}).empty());
  CHECK(!objection_to({offer_of(22809, "a", true), offer_of(22809, "a", true)}).empty());
}

TEST_CASE("factors of sums of floats are one, in the tensor's type") {
  using nccl::reduction_of;
  CHECK(!reduction_of(DType::kFloat32, ReduceOp::kSum, {})->factor);
  CHECK(!reduction_of(DType::kFloat16, ReduceOp::kSum, {0.25, 4})->factor);
  CHECK(factor_of<float>(reduction_of(DType::kFloat32, ReduceOp::kSum, {0.5, 3})) == 1.5F);
  CHECK(factor_of<double>(reduction_of(DType::kFloat64, ReduceOp::kSum, {1, 0.1})) == 0.1);
  const auto half = [](double factor) {
    return reduction_of(DType::kFloat16, ReduceOp::kSum, {1, factor});
  };
  CHECK(factor_of<std::uint16_t>(half(-2)) == 0xC000);
  CHECK(factor_of<std::uint16_t>(half(1.0 / 3)) == 0x3555);
  CHECK(factor_of<std::uint16_t>(half(0.99999)) == 0x3C00);
  CHECK(!half(1e-6));
  CHECK(!half(1e6));
  const auto wide = reduction_of(DType::kBfloat16, ReduceOp::kSum, {1, 1.0 / 3});
  CHECK(factor_of<std::uint16_t>(wide) == 0x3EAB);
  CHECK(!reduction_of(DType::kFloat32, ReduceOp::kSum, {1, 0}));
}

TEST_CASE("what NCCL has no notion of is left to others") {
  using nccl::reduction_of;
  CHECK(!reduction_of(DType::kInt16, ReduceOp::kSum, {}));
  CHECK(!reduction_of(DType::kUint16, ReduceOp::kMax, {}));
  CHECK(!reduction_of(DType::kUint64, ReduceOp::kSum, {1, 0.5}));
  CHECK(reduction_of(DType::kUint32, ReduceOp::kSum, {})->type == nccl::DataType::kUint32);
  CHECK(reduction_of(DType::kUint64, ReduceOp::kMin, {})->type == nccl::DataType::kUint64);
  CHECK(!reduction_of(DType::kInt32, ReduceOp::kSum, {1, 0.5}));
  CHECK(!reduction_of(DType::kFloat32, ReduceOp::kAdasum, {}));
  CHECK(!reduction_of(DType::kFloat32, ReduceOp::kMax, {2, 1}));
  CHECK(reduction_of(DType::kBool, ReduceOp::kSum, {})->op == nccl::RedOp::kMax);
  CHECK(reduction_of(DType::kBool, ReduceOp::kProduct, {})->op == nccl::RedOp::kMin);
}

TEST_CASE("levels are there where several hosts have equally many ranks, and more than one") {
  const auto levels = [](std::vector<int> members, int rank, std::vector<int> hosts) {
    return nccl::levels_of(members, rank,
                           [&](int r) { return hosts.at(static_cast<std::size_t>(r)); });
  };
  using Ranks = std::vector<int>;
  const auto by_turns = levels({0, 1, 2, 3, 4, 5}, 4, {0, 1, 0, 1, 0, 1});
  REQUIRE(by_turns);
  CHECK(by_turns->here == Ranks{0, 2, 4});
  CHECK(by_turns->across == Ranks{4, 5});
  CHECK(by_turns->place == 2);
  const auto crossed = levels({0, 1, 2, 3}, 2, {0, 1, 1, 0});
  CHECK(crossed->across == Ranks{2, 3});
  CHECK(!levels({1, 2}, 1, {0, 0, 0}));
  CHECK(!levels({0, 1}, 1, {0, 1}));
  CHECK(!levels({0, 1, 2}, 1, {0, 0, 1}));
  CHECK(levels({0, 1, 3, 4}, 3, {0, 0, 0, 1, 1, 1})->across == Ranks{0, 3});
}

TEST_CASE("ranks as threads on two hosts reduce by NCCL within each, and by CPUs between them") {
  // Among them what is packed, what is not, what does not divide, and more than a buffer holds.
  const std::vector<std::size_t> counts{1001, 7, 40000, 16000, 70001, 5'000'003};
  const auto by_levels = [](Connections& connections) {
    use_nccl(connections);
    connections.hierarchical = true;
  };
  ThreadWorld world({{0, 1}, {2, 3}}, {{0, 1, 3}, {0, 3}, {1, 2}}, {}, by_levels);
  world.run([&](int rank, Engine& engine) {
    for (int step = 0; step < 2; ++step) {
      std::vector<std::unique_ptr<OnGpu>> tensors;
      std::vector<OperationPtr> flying;
      for (const std::size_t count : counts) {
        std::vector<float> values(count);
        for (std::size_t i = 0; i < count; ++i) {
          values[i] = static_cast<float>(i % 1000) + static_cast<float>(rank + step);
        }
        tensors.push_back(std::make_unique<OnGpu>(rank, values));
        flying.push_back(engine.submit(tensors.back()->allreduce("n" + std::to_string(count))));
      }
      for (const OperationPtr& operation : flying) {
        engine.wait(operation);
        operation->arrived->hold(operation->submission.stream);
      }
      for (std::size_t t = 0; t < tensors.size(); ++t) {
        const std::vector<float> got = tensors[t]->get();
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < got.size(); ++i) {
          const auto terms =
              static_cast<float>(i % 1000 * 4 + 6 + 4 * static_cast<std::size_t>(step));
          wrong += got[i] != terms ? 1 : 0;
        }
        CHECK(wrong == 0);
      }
    }
    const std::size_t bytes = 2 * 4 * std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    CHECK(engine.counters().at("nccl_bytes") == bytes);
    // A half of them up and down, and what fills the last piece.
    CHECK(engine.counters().at("staged_bytes") >= bytes);
    CHECK(engine.counters().at("staged_bytes") < bytes + 16 * 1024);
  });
  world.shutdown();
}

TEST_CASE("ranks as threads reduce on their GPUs by NCCL, packed and not, in flight together") {
  constexpr std::size_t kCounts[] = {1001, 7, 40000, 16000};
  ThreadWorld world(one_host(2), {}, {}, use_nccl);
  world.run([&](int rank, Engine& engine) {
    for (int step = 0; step < 4; ++step) {
      std::vector<std::unique_ptr<OnGpu>> tensors;
      std::vector<OperationPtr> flying;
      for (const std::size_t count : kCounts) {
        tensors.push_back(std::make_unique<OnGpu>(
            rank, std::vector<float>(count, static_cast<float>(rank + 1 + step))));
        flying.push_back(engine.submit(tensors.back()->allreduce("n" + std::to_string(count))));
      }
      for (const OperationPtr& operation : flying) {
        engine.wait(operation);
        operation->arrived->hold(operation->submission.stream);
      }
      for (std::size_t i = 0; i < tensors.size(); ++i) {
        const auto sum = static_cast<float>(3 + 2 * step);
        CHECK(tensors[i]->get() == std::vector<float>(kCounts[i], sum));
      }
    }
    CHECK(engine.counters().at("nccl_bytes") == 4 * 4 * (1001 + 7 + 40000 + 16000));
  });
  world.shutdown();
}

TEST_CASE("the end of a job lets go of streams that wait for a rank in NCCL") {
  setenv("POLYHVD_STAND_IN_NCCL_FAULT", "hang:1:1", 1);
  ThreadWorld world(one_host(2), {}, {}, use_nccl);
  std::latch begun(2);
  world.run([&](int rank, Engine& engine) {
    OnGpu tensor(rank, {1, 2, 3});
    const OperationPtr operation = engine.submit(tensor.allreduce("stuck"));
    engine.wait(operation);
    CHECK(!operation->is_over());
    operation->arrived->hold(operation->submission.stream);
    begun.arrive_and_wait();
    if (rank == 1) engine.abort("a test ends it");
    (void)tensor.get();  // would wait for ever
    CHECK(operation->is_over());
  });
  unsetenv("POLYHVD_STAND_IN_NCCL_FAULT");
  world.shutdown();
}
