// The CUDA driver's objects, and staging between ranks that are threads, on the stand-in of the
// driver; under the sanitizers as well.
#include <dlfcn.h>
#include <doctest/doctest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <future>
#include <numeric>
#include <string>

#include "../../backends/gpu/devices.h"
#include "../../backends/gpu/staging.h"
#include "api/native_api.h"
#include "thread_world.h"

using namespace polyhvd;
using namespace polyhvd::test;

namespace {

// Loaded by its path, before anybody looks for a library of its name.
void load_stand_in() {
  static void* const library = dlopen("build/gpu/libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  REQUIRE_MESSAGE(library != nullptr, "make stand-ins builds build/gpu/libcuda.so.1");
}

gpu::ContextPtr context_of(int device) {
  load_stand_in();
  return gpu::Context::open(std::make_shared<gpu::Driver>(0), device);
}

template <class Call>
Error error_of(Call&& call) {
  try {
    call();
  } catch (const Failure& failure) {
    return failure.error();
  }
  return {ErrorCode::kInternal, "no error"};
}

// Floats on a GPU that come and go through a stream.
class Floats {
 public:
  Floats(gpu::ContextPtr context, std::size_t count)
      : context_(std::move(context)),
        stream_(context_),
        pinned_(context_, bytes(count)),
        memory_(context_->allocate(bytes(count))),
        count_(count) {}
  ~Floats() { stream_.drain(); }

  void set(const std::vector<float>& values) {
    std::memcpy(pinned_.data(), values.data(), bytes(count_));
    stream_.copy_to_device(memory_.get(), pinned_.data(), bytes(count_));
  }
  std::vector<float> get() {
    stream_.copy_to_host(pinned_.data(), memory_.get(), bytes(count_));
    stream_.drain();
    std::vector<float> values(count_);
    std::memcpy(values.data(), pinned_.data(), bytes(count_));
    return values;
  }
  TensorView view() const {
    return {memory_.get(),
            {static_cast<std::int64_t>(count_)},
            DType::kFloat32,
            {DeviceKind::kCuda, context_->device()}};
  }
  Stream stream() const { return stream_.get(); }

 private:
  static std::size_t bytes(std::size_t count) { return count * sizeof(float); }

  gpu::ContextPtr context_;
  gpu::OwnStream stream_;
  gpu::PinnedMemory pinned_;
  std::shared_ptr<std::byte> memory_;
  std::size_t count_;
};

Submission in_place(std::string name, const Floats& floats) {
  Submission s;
  s.name = std::move(name);
  s.inputs = {floats.view()};
  s.outputs = s.inputs;
  s.stream = floats.stream();
  return s;
}

// Waits as PyHandle does: the stream goes on after the operation, the thread goes on at once.
void wait(Engine& engine, const OperationPtr& operation) {
  engine.wait(operation);
  REQUIRE(operation->arrived);
  operation->arrived->hold(operation->submission.stream);
}

// Keeps a stream from going on until it is opened.
class Gate {
 public:
  explicit Gate(const gpu::Context& context, Stream stream) {
    using Enqueue = void (*)(void*, void (*)(void*), void*);
    void* library = dlopen("build/gpu/libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    const auto enqueue = reinterpret_cast<Enqueue>(dlsym(library, "polyhvd_stand_in_enqueue"));
    const gpu::Current current(context);
    enqueue(stream, [](void* self) { static_cast<Gate*>(self)->open_.wait(false); }, this);
  }
  void open() {
    open_.store(true);
    open_.notify_all();
  }

 private:
  std::atomic<bool> open_{false};
};

// Staging into a GPU's memory behind a program's stream that is held up.
struct HeldUp {
  static constexpr std::size_t kBytes = 1024;
  HeldUp() : context(context_of(0)), program(context), gate(*context, program.get()) {
    parking.set_on_slow([] {});
    const DeviceEventPtr ready = program.record();
    staging.begin({DeviceKind::kCuda, 0}, std::span(&ready, 1));
  }
  void deliver(std::size_t rounds, Deadline deadline) {
    const auto nothing = [](std::size_t, std::byte*) {};
    staging.run(rounds, kBytes, deadline, nothing, nothing, [&](std::size_t, std::byte* memory) {
      staging.copy_to_device(target.get(), memory, kBytes);
    });
  }

  gpu::ContextPtr context;
  gpu::OwnStream program;
  Gate gate;
  Parking parking;
  gpu::Staging staging{std::make_shared<gpu::Devices>(std::make_shared<gpu::Driver>(0), 0), parking,
                       kBytes};
  std::shared_ptr<std::byte> target = context->allocate(kBytes);
};

std::vector<float> ramp(std::size_t count, float from) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), from);
  return values;
}

}  // namespace

TEST_CASE("a driver that cannot be loaded is a refusal that says what to do") {
  const auto driver = std::make_shared<gpu::Driver>(3, "libcuda-of-nobody.so");
  const Error error = error_of([&] { gpu::Context::open(driver, 0); });
  CHECK(error.code == ErrorCode::kInvalidArgument);
  CHECK(error.message.find("rank 3") != std::string::npos);
  CHECK(error.message.find("libcuda-of-nobody.so") != std::string::npos);
  CHECK(error.message.find("move them to the CPU") != std::string::npos);
}

TEST_CASE("a GPU that is not there is a refusal that says how many are") {
  const Error error = error_of([] { context_of(7); });
  CHECK(error.code == ErrorCode::kInvalidArgument);
  CHECK(error.message.find("GPU 7 does not exist; number of GPUs that the driver reports: 4") !=
        std::string::npos);
}

TEST_CASE("GPUs have different UUIDs") {
  load_stand_in();
  gpu::Driver driver(0);
  CHECK(driver.uuid_of(0) != driver.uuid_of(1));
}

TEST_CASE("a stream that is held by an event sees what came before it") {
  const auto context = context_of(0);
  constexpr std::size_t kCount = 10000;
  for (int repeat = 0; repeat < 20; ++repeat) {
    Floats source(context, kCount);
    const gpu::OwnStream reader(context);
    gpu::PinnedMemory copy(context, kCount * sizeof(float));
    const auto values = ramp(kCount, static_cast<float>(repeat));
    source.set(values);
    const DeviceEventPtr made = context->record(source.stream());
    made->hold(reader.get());
    reader.copy_to_host(copy.data(), static_cast<std::byte*>(source.view().data), copy.bytes());
    const DeviceEventPtr read = reader.record();
    while (!read->reached()) std::this_thread::yield();
    CHECK(made->reached());
    CHECK(std::memcmp(copy.data(), values.data(), copy.bytes()) == 0);
  }
}

TEST_CASE("a rank works on the GPU that it has used first") {
  load_stand_in();
  gpu::Devices devices(std::make_shared<gpu::Driver>(5), 5);
  CHECK(devices.own(DeviceKind::kCuda) == Device{DeviceKind::kCuda, 1});  // of four, for the sixth
  CHECK(devices.record({DeviceKind::kCuda, 0}, nullptr) != nullptr);
  CHECK(devices.own(DeviceKind::kCuda) == Device{DeviceKind::kCuda, 0});
  const Error error = error_of([&] { devices.record({DeviceKind::kCuda, 1}, nullptr); });
  CHECK(error.code == ErrorCode::kInvalidArgument);
  CHECK(error.message.find("rank 5 has used GPU 0") != std::string::npos);
  CHECK(devices.allocate({DeviceKind::kCuda, 0}, 0) == nullptr);
}

TEST_CASE("what is copied in is there for any stream") {
  const auto context = context_of(0);
  gpu::Devices devices(std::make_shared<gpu::Driver>(0), 0);
  const auto values = ramp(5000, 1);
  const std::size_t bytes = values.size() * sizeof(float);
  const auto memory = devices.allocate({DeviceKind::kCuda, 0}, bytes);
  const auto* data = reinterpret_cast<const std::byte*>(values.data());
  devices.copy_in({DeviceKind::kCuda, 0}, memory.get(), data, bytes);
  const gpu::OwnStream reader(context);
  gpu::PinnedMemory copy(context, bytes);
  reader.copy_to_host(copy.data(), memory.get(), bytes);
  reader.drain();
  CHECK(std::memcmp(copy.data(), data, bytes) == 0);
}

TEST_CASE("nothing is delivered before the program's stream is done with the memory") {
  HeldUp held;
  held.deliver(1, Parking::kForever);
  const DeviceEventPtr arrived = held.staging.end();
  REQUIRE(arrived);
  const gpu::OwnStream other(held.context);
  other.drain();
  CHECK_FALSE(arrived->reached());
  held.gate.open();
  while (!arrived->reached()) std::this_thread::yield();
}

TEST_CASE("pinned memory is not used again before it was delivered") {
  HeldUp held;
  held.deliver(3, Parking::kForever);  // one in each slot
  const Error error =
      error_of([&] { held.deliver(1, Parking::Clock::now() + std::chrono::milliseconds(20)); });
  CHECK(error.code == ErrorCode::kTimeout);
  held.gate.open();
  held.deliver(4, Parking::kForever);
}

TEST_CASE("staging that ends waits for the copies that it has begun") {
  HeldUp held;
  held.deliver(2, Parking::kForever);
  const DeviceEventPtr arrived = held.staging.end();
  std::atomic<bool> settled{false};
  std::thread opener([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK_FALSE(settled.load());
    held.gate.open();
  });
  held.staging.settle();
  settled.store(true);
  CHECK(arrived->reached());
  opener.join();
}

TEST_CASE("ranks as threads reduce what their GPUs hold, in many rounds and in flight together") {
  load_stand_in();
  ThreadWorld world({{0, 1}, {2}});
  static constexpr std::size_t kLarge = (3U << 20) + 12345;  // more rounds than slots
  static constexpr std::size_t kSmall = 1001;
  world.run([](int rank, Engine& engine) {
    const auto context = context_of(rank % 2);
    Floats large(context, kLarge);
    std::vector<std::unique_ptr<Floats>> small;
    for (int step = 0; step < 3; ++step) {
      std::vector<OperationPtr> flying;
      for (int i = 0; i < 6; ++i) {
        small.push_back(std::make_unique<Floats>(context, kSmall));
        small.back()->set(ramp(kSmall, static_cast<float>(100 * i + rank)));
        flying.push_back(engine.submit(in_place("small " + std::to_string(i), *small.back())));
      }
      large.set(ramp(kLarge, static_cast<float>(rank)));
      flying.push_back(engine.submit(in_place("large", large)));
      for (const OperationPtr& operation : flying) wait(engine, operation);
      const std::vector<float> total = large.get();
      CHECK(total[0] == 3);
      CHECK(total[kLarge - 1] == 3 * static_cast<float>(kLarge - 1) + 3);
      for (int i = 0; i < 6; ++i) {
        const std::vector<float> sum = small[small.size() - 6 + static_cast<std::size_t>(i)]->get();
        CHECK(sum[0] == static_cast<float>(300 * i + 3));
        CHECK(sum[kSmall - 1] == static_cast<float>(300 * i + 3 + 3 * (kSmall - 1)));
      }
    }
  });
  world.shutdown();
}

// One rank's half of a sum through the C table, as a kernel of a framework would ask for it. The
// inputs are made on one stream, where an event says so, and the results used on another one.
struct NativeSum {
  static constexpr std::size_t kCount = 5000;

  explicit NativeSum(int rank)
      : context(context_of(rank)),
        floats(context, kCount),
        consumer(context),
        copy(context, kCount * sizeof(float)) {
    submission.size = sizeof submission;
    submission.kind = static_cast<std::int32_t>(OpKind::kAllreduce);
    submission.op = static_cast<std::int32_t>(ReduceOp::kSum);
    submission.name = "native";
    submission.root = -1;
    submission.prescale = submission.postscale = 1;
    const TensorView view = floats.view();
    tensor = {view.data, &shape, 1, static_cast<std::int32_t>(view.dtype), 1, rank};
    submission.inputs = submission.outputs = &tensor;
    submission.count = 1;
    submission.stream = consumer.get();
    submission.context = this;
    // On a thread of the engine, which waits for no GPU: what is given to the stream reads sums.
    submission.done = [](void* self, std::int32_t code, const char*) {
      auto& sum = *static_cast<NativeSum*>(self);
      if (code == 0) {
        sum.consumer.copy_to_host(sum.copy.data(), static_cast<std::byte*>(sum.tensor.data),
                                  sum.copy.bytes());
      }
      sum.done.set_value(code);
    };
  }
  // The first and the last element, as the consumer's stream has seen them.
  std::pair<float, float> seen() {
    consumer.drain();
    const auto* values = reinterpret_cast<const float*>(copy.data());
    return {values[0], values[kCount - 1]};
  }

  gpu::ContextPtr context;
  Floats floats;
  gpu::OwnStream consumer;
  gpu::PinnedMemory copy;
  std::int64_t shape = kCount;
  polyhvd_tensor tensor{};
  polyhvd_submission submission{};
  std::promise<int> done;
};

TEST_CASE("a native submission waits for its event, and its stream for the results") {
  load_stand_in();
  using EventCreate = int (*)(void**, unsigned);
  using EventRecord = int (*)(void*, void*);
  using EventDestroy = int (*)(void*);
  void* library = dlopen("build/gpu/libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  const auto create = reinterpret_cast<EventCreate>(dlsym(library, "cuEventCreate"));
  const auto record = reinterpret_cast<EventRecord>(dlsym(library, "cuEventRecord"));
  const auto destroy = reinterpret_cast<EventDestroy>(dlsym(library, "cuEventDestroy_v2"));
  for (const bool with_event : {true, false}) {
    ThreadWorld world(one_host(2));
    world.run([&](int rank, Engine& engine) {
      const NativeApi api(engine, 1);
      NativeSum sum(rank);
      Gate gate(*sum.context, sum.floats.stream());
      sum.floats.set(ramp(NativeSum::kCount, static_cast<float>(rank)));  // behind the gate
      void* event = nullptr;
      if (with_event) {
        const gpu::Current current(*sum.context);
        REQUIRE(create(&event, 2) == 0);
        REQUIRE(record(event, sum.floats.stream()) == 0);
        sum.submission.event = event;
      } else {
        sum.context->record(sum.floats.stream())->hold(sum.consumer.get());
      }
      std::array<char, 512> text{};
      const auto& table = api.table();
      REQUIRE(table.submit(table.engine, &sum.submission, text.data(), text.size()) == 0);
      gate.open();
      CHECK(sum.done.get_future().get() == 0);
      CHECK(sum.seen() == std::pair(1.0F, static_cast<float>(2 * NativeSum::kCount - 1)));
      const gpu::Current current(*sum.context);
      if (event != nullptr) CHECK(destroy(event) == 0);
    });
    world.shutdown();
  }
}

TEST_CASE("a call that fails ends the job on every rank, and no copy comes after that") {
  const auto calls = [](const char* name) {
    load_stand_in();
    void* library = dlopen("build/gpu/libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    return reinterpret_cast<long (*)(const char*)>(dlsym(library, "polyhvd_stand_in_calls"))(name);
  };
  constexpr const char* kCall = "cuMemcpyHtoDAsync_v2";
  constexpr std::size_t kCount = 6U << 20;
  ThreadWorld world(one_host(2));
  std::vector<std::unique_ptr<Floats>> tensors;
  for (int rank = 0; rank < 2; ++rank) {
    tensors.push_back(std::make_unique<Floats>(context_of(rank), kCount));
    tensors.back()->set(ramp(kCount, 0));
    tensors.back()->get();
  }
  const std::string which = kCall + (":" + std::to_string(calls(kCall) + 5)) + ":1";
  setenv("POLYHVD_STAND_IN_CUDA_FAIL", which.c_str(), 1);
  world.run([&](int rank, Engine& engine) {
    Floats& tensor = *tensors[static_cast<std::size_t>(rank)];
    const Error error = error_of([&] { engine.wait(engine.submit(in_place("failing", tensor))); });
    CHECK(error.message.find("cuMemcpyHtoDAsync on GPU") != std::string::npos);
    CHECK(error.message.find("CUDA_ERROR_INVALID_VALUE") != std::string::npos);
    tensor.set(ramp(kCount, 5));
    context_of(rank)->allocate(1).reset();  // waits for everything on the GPU
    CHECK(tensor.get() == ramp(kCount, 5));
  });
  unsetenv("POLYHVD_STAND_IN_CUDA_FAIL");
  world.shutdown();
}
