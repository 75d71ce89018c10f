// The reductions of every instruction set that this machine runs, against a scalar
// oracle written from the contract in kernels.h alone, and against each other.
#include <doctest/doctest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "control/cpu_features.h"
#include "host/kernels.h"
#include "host/kernels_table.h"
#include "kernel_oracle.h"

namespace {

using namespace polyhvd;
using namespace polyhvd::host;
using namespace polyhvd::host::oracle;

constexpr std::array kOps = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
constexpr std::array<std::size_t, 19> kCounts = {0,  1,  2,   3,   7,   15,  16,  17,  31,  33,
                                                 63, 64, 127, 128, 129, 255, 257, 511, 1030};
// Factors that are exact and not, that overflow, vanish and make NaNs.
constexpr std::array<Scale, 8> kScales = {{{1, 1},
                                           {0.5, 1},
                                           {1, 1.0 / 3},
                                           {1.0 / 3, 0.7},
                                           {-1.5, 1e3},
                                           {1e300, 1},
                                           {1, std::numeric_limits<double>::infinity()},
                                           {1, std::numeric_limits<double>::quiet_NaN()}}};

std::vector<DType> all_dtypes() {
  std::vector<DType> dtypes;
  for (int d = 0; d < kDTypeCount; ++d) dtypes.push_back(static_cast<DType>(d));
  return dtypes;
}

// Half of the elements are any bits (NaNs, infinities and denormal numbers among
// them), half are moderate numbers, for which sums and products stay finite.
Bytes random_elements(DType dtype, std::size_t count, std::mt19937& random) {
  Bytes bytes(count * item_size(dtype));
  for (std::byte& b : bytes) b = std::byte{static_cast<unsigned char>(random())};
  std::normal_distribution<float> moderate(0, 4);
  for (std::size_t i = 0; i < count; ++i) {
    if (random() % 2 == 0) continue;
    const float value = moderate(random);
    if (dtype == DType::kFloat64) put(bytes, i, static_cast<double>(value) / 3);
    if (dtype == DType::kFloat32) put(bytes, i, value);
    if (accumulator_of(dtype) != dtype) put(bytes, i, format_of(dtype).encode(value));
    if (dtype == DType::kInt64) put(bytes, i, static_cast<std::int64_t>(value * 1000));
    if (dtype == DType::kInt32) put(bytes, i, static_cast<std::int32_t>(value * 1000));
    if (dtype == DType::kBool) bytes[i] = std::byte{value > 0};
  }
  return bytes;
}

// Memory at an odd address, with a guard behind it that nothing may touch.
class Guarded {
 public:
  explicit Guarded(std::size_t size) : size_(size), bytes_(1 + size + kGuard, std::byte{0xa5}) {}
  std::byte* data() { return bytes_.data() + 1; }
  Bytes contents() const { return {bytes_.begin() + 1, bytes_.begin() + 1 + size_}; }
  bool intact() const {
    for (std::size_t i = 1 + size_; i < bytes_.size(); ++i)
      if (bytes_[i] != std::byte{0xa5}) return false;
    return bytes_[0] == std::byte{0xa5};
  }

 private:
  static constexpr std::size_t kGuard = 64;
  std::ptrdiff_t size_;
  Bytes bytes_;
};

Kernel kernel_of(const KernelTable& table, Stage stage, DType dtype, ReduceOp op) {
  const auto& rows = stage == Stage::kReduce      ? table.reduce
                     : stage == Stage::kToPartial ? table.to_partial
                                                  : table.from_partial;
  return rows[static_cast<int>(dtype)][kernel_column(op)];
}

struct Inputs {
  Inputs(DType dtype, std::size_t source_count, std::size_t count, std::mt19937& random) {
    for (std::size_t s = 0; s < source_count; ++s)
      memory.push_back(random_elements(dtype, count, random));
    for (const Bytes& bytes : memory) sources.push_back(bytes.data());
  }
  std::vector<Bytes> memory;
  std::vector<const std::byte*> sources;
};

// Runs a kernel out of place and returns `out`, after checking `copy` and guards.
Bytes run(Kernel kernel, DType out_type, Scale scale, const std::vector<const std::byte*>& sources,
          std::size_t count) {
  Guarded out(count * item_size(out_type));
  Guarded copy(count * item_size(out_type));
  kernel({scale.pre, scale.post, sources.data(), sources.size(), count, out.data(), copy.data()});
  CHECK(out.intact());
  CHECK(copy.intact());
  CHECK(copy.contents() == out.contents());
  return out.contents();
}

std::string first_difference(const Bytes& got, const Bytes& want) {
  for (std::size_t i = 0; i < want.size(); ++i)
    if (got[i] != want[i]) return "byte " + std::to_string(i);
  return "none";
}

// Compares all instruction sets with the oracle; stops at the first difference.
void check_stage(Stage stage, DType dtype, ReduceOp op) {
  std::mt19937 random(17);
  for (const std::size_t count : kCounts)
    for (const std::size_t source_count : {1, 2, 3, 4, 9})
      for (const Scale scale : kScales) {
        const Inputs in(input_type(stage, dtype), source_count, count, random);
        const Bytes want = expected(stage, dtype, op, scale, in.sources, count);
        for (const KernelTable* table : runnable_tables()) {
          const Bytes got = run(kernel_of(*table, stage, dtype, op), output_type(stage, dtype),
                                scale, in.sources, count);
          if (got == want) continue;
          FAIL(std::string(table->name)
               << " " << name_of(dtype) << " " << name_of(op) << " stage "
               << static_cast<int>(stage) << " x" << source_count << " count " << count << " pre "
               << scale.pre << " post " << scale.post << ": " << first_difference(got, want));
        }
      }
}

std::vector<Stage> stages_of(DType dtype) {
  if (accumulator_of(dtype) == dtype) return {Stage::kReduce};
  return {Stage::kReduce, Stage::kToPartial, Stage::kFromPartial};
}

}  // namespace

TEST_CASE("every instruction set agrees with the oracle") {
  for (const DType dtype : all_dtypes())
    for (const ReduceOp op : kOps)
      for (const Stage stage : stages_of(dtype)) check_stage(stage, dtype, op);
}

TEST_CASE("types that are their own accumulator use one kernel for all stages") {
  for (const KernelTable* table : runnable_tables())
    for (const DType dtype : all_dtypes())
      for (const ReduceOp op : kOps) {
        if (accumulator_of(dtype) != dtype) continue;
        const Kernel reduce = kernel_of(*table, Stage::kReduce, dtype, op);
        const bool to_partial = kernel_of(*table, Stage::kToPartial, dtype, op) == reduce;
        const bool from_partial = kernel_of(*table, Stage::kFromPartial, dtype, op) == reduce;
        CHECK(to_partial);
        CHECK(from_partial);
      }
}

TEST_CASE("every instruction set gives the bits of the baseline") {
  std::mt19937 random(5);
  for (const DType dtype : all_dtypes())
    for (const ReduceOp op : kOps)
      for (const Stage stage : stages_of(dtype))
        for (const Scale scale : {Scale{}, Scale{0.3, 0.7}}) {
          constexpr std::size_t kCount = 40'007;
          const Inputs in(input_type(stage, dtype), 3, kCount, random);
          const auto out_type = output_type(stage, dtype);
          const Bytes want = run(kernel_of(*baseline_table(), stage, dtype, op), out_type, scale,
                                 in.sources, kCount);
          for (const KernelTable* table : runnable_tables()) {
            const Kernel kernel = kernel_of(*table, stage, dtype, op);
            const bool same = run(kernel, out_type, scale, in.sources, kCount) == want;
            CHECK_MESSAGE(same, std::string(table->name)
                                    << " " << name_of(dtype) << " " << name_of(op));
          }
        }
}

TEST_CASE("an element's result does not depend on its place") {
  constexpr std::size_t kCount = 700;
  std::mt19937 random(3);
  for (const KernelTable* table : runnable_tables())
    for (const DType dtype : all_dtypes()) {
      const std::size_t size = item_size(dtype);
      const Inputs in(dtype, 3, kCount, random);
      const Kernel kernel = kernel_of(*table, Stage::kReduce, dtype, ReduceOp::kSum);
      const Bytes whole = run(kernel, dtype, {0.3, 1}, in.sources, kCount);
      for (const std::size_t first : {1, 13, 64, 699}) {
        std::vector<const std::byte*> shifted;
        for (const std::byte* source : in.sources) shifted.push_back(source + first * size);
        const Bytes part = run(kernel, dtype, {0.3, 1}, shifted, kCount - first);
        CHECK(std::memcmp(part.data(), whole.data() + first * size, part.size()) == 0);
      }
    }
}

TEST_CASE("out and copy may each be a source") {
  constexpr std::size_t kCount = 333;
  std::mt19937 random(11);
  for (const KernelTable* table : runnable_tables())
    for (const DType dtype : all_dtypes())
      for (std::size_t out = 0; out < 3; ++out)
        for (std::size_t copy = 0; copy < 3; ++copy) {
          if (copy == out) continue;
          Inputs in(dtype, 3, kCount, random);
          const Bytes want =
              expected(Stage::kReduce, dtype, ReduceOp::kSum, {1, 0.5}, in.sources, kCount);
          kernel_of(*table, Stage::kReduce, dtype,
                    ReduceOp::kSum)({1, 0.5, in.sources.data(), 3, kCount, in.memory[out].data(),
                                     in.memory[copy].data()});
          CHECK(in.memory[out] == want);
          CHECK(in.memory[copy] == want);
        }
}

TEST_CASE("every half value passes through unchanged, NaNs as the canonical one") {
  Bytes all(65536 * 2);
  for (int bits = 0; bits < 65536; ++bits) put(all, bits, static_cast<std::uint16_t>(bits));
  for (const KernelTable* table : runnable_tables())
    for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
      const Kernel kernel = kernel_of(*table, Stage::kReduce, dtype, ReduceOp::kSum);
      const Bytes out = run(kernel, dtype, {}, {all.data()}, 65536);
      for (int bits = 0; bits < 65536; ++bits) {
        const bool nan = std::isnan(format_of(dtype).decode(static_cast<std::uint16_t>(bits)));
        const int want = !nan ? bits : dtype == DType::kFloat16 ? 0x7e00 : 0x7fc0;
        if (get<std::uint16_t>(out.data(), bits) != want)
          FAIL(std::string(table->name) << " " << bits);
      }
    }
}

TEST_CASE("floats around every half value and midpoint round to the nearest, ties to even") {
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    Bytes floats;
    for (int bits = 0; bits < 0x7fff; ++bits) {
      const double low = format_of(dtype).decode(static_cast<std::uint16_t>(bits));
      const double high = format_of(dtype).decode(static_cast<std::uint16_t>(bits + 1));
      if (!std::isfinite(low)) continue;
      const double past = std::isfinite(high) ? high : dtype == DType::kFloat16 ? 65536 : low;
      const float middle = static_cast<float>((low + past) / 2);
      for (const float at : {static_cast<float>(low), middle})
        for (const float v : {at, std::nextafterf(at, 0), std::nextafterf(at, INFINITY)})
          for (const float value : {v, -v}) {
            const std::size_t i = floats.size() / sizeof value;
            floats.resize(floats.size() + sizeof value);
            put(floats, i, value);
          }
    }
    const std::size_t count = floats.size() / sizeof(float);
    const Bytes want =
        expected(Stage::kFromPartial, dtype, ReduceOp::kSum, {}, {floats.data()}, count);
    for (const KernelTable* table : runnable_tables()) {
      const Kernel kernel = kernel_of(*table, Stage::kFromPartial, dtype, ReduceOp::kSum);
      CHECK(run(kernel, dtype, {}, {floats.data()}, count) == want);
      // The one-step kernel narrows in another way: reach the same sums through it.
      const Bytes widened = run(kernel_of(*table, Stage::kToPartial, dtype, ReduceOp::kSum),
                                DType::kFloat32, {}, {want.data()}, count);
      const Bytes again = run(kernel, dtype, {}, {widened.data()}, count);
      const Bytes through = run(kernel_of(*table, Stage::kReduce, dtype, ReduceOp::kSum), dtype, {},
                                {want.data()}, count);
      CHECK(again == through);
    }
  }
}

TEST_CASE("one rounding of the sum of two halves is the rounding of the exact sum") {
  std::mt19937 random(23);
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16}) {
    constexpr std::size_t kCount = 200'000;
    Bytes a(kCount * 2), b(kCount * 2);
    for (std::size_t i = 0; i < kCount; ++i) {
      // Near exponents, so that the bits below the result's last matter; denormal
      // and greatest ones among them.
      const unsigned bits = random() & 0xffff;
      put(a, i, static_cast<std::uint16_t>(bits));
      put(b, i, static_cast<std::uint16_t>(bits ^ (random() & 0x87ff)));
    }
    const Bytes want =
        expected(Stage::kReduce, dtype, ReduceOp::kSum, {}, {a.data(), b.data()}, kCount);
    for (const KernelTable* table : runnable_tables())
      CHECK(run(kernel_of(*table, Stage::kReduce, dtype, ReduceOp::kSum), dtype, {},
                {a.data(), b.data()}, kCount) == want);
  }
}

TEST_CASE("terms are added from left to right") {
  const float big = 1e8f, one = 1.0f, minus = -1e8f;
  const auto at = [](const float& v) { return reinterpret_cast<const std::byte*>(&v); };
  float out = 0;
  const std::array<const std::byte*, 3> cancels_first = {at(big), at(minus), at(one)};
  const std::array<const std::byte*, 3> cancels_last = {at(big), at(one), at(minus)};
  std::byte* to = reinterpret_cast<std::byte*>(&out);
  reduce(DType::kFloat32, ReduceOp::kSum, {}, cancels_first, 1, to, nullptr);
  CHECK(out == 1.0f);
  reduce(DType::kFloat32, ReduceOp::kSum, {}, cancels_last, 1, to, nullptr);
  CHECK(out == 0.0f);
}

TEST_CASE("partial sums of halves keep what a half cannot hold") {
  // 2048 + 1 is not a float16; with 1 more from another host it is.
  const std::array<std::uint16_t, 3> halves = {0x6800, 0x3c00, 0x3c00};
  const auto at = [&](int i) { return reinterpret_cast<const std::byte*>(&halves[i]); };
  std::array<float, 2> partials{};
  const auto partial = [&](int i) { return reinterpret_cast<std::byte*>(&partials[i]); };
  const std::array<const std::byte*, 2> first_host = {at(0), at(1)};
  const std::array<const std::byte*, 1> second_host = {at(2)};
  reduce_to_partial(DType::kFloat16, ReduceOp::kSum, 1, first_host, 1, partial(0));
  reduce_to_partial(DType::kFloat16, ReduceOp::kSum, 1, second_host, 1, partial(1));
  CHECK(partials[0] == 2049.0f);

  std::uint16_t out = 0, copy = 0;
  const std::array<const std::byte*, 2> both = {partial(0), partial(1)};
  combine_partials(DType::kFloat16, ReduceOp::kSum, 0.5, both, 1,
                   reinterpret_cast<std::byte*>(&out), reinterpret_cast<std::byte*>(&copy));
  CHECK(kFloat16Format.decode(out) == 1025.0);
  CHECK(copy == out);
}

#if defined(__x86_64__)
TEST_CASE("the thread's flush-to-zero mode neither matters nor changes") {
  const float tiny = 1e-40f;
  const float twice = tiny + tiny;
  float out = 0;
  const std::byte* source = reinterpret_cast<const std::byte*>(&tiny);
  const std::array sources = {source, source};
  const unsigned before = _mm_getcsr();
  const unsigned flushing = before | 0x8040;
  _mm_setcsr(flushing);
  reduce(DType::kFloat32, ReduceOp::kSum, {}, sources, 1, reinterpret_cast<std::byte*>(&out),
         nullptr);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  CHECK(after == flushing);
  CHECK(out == twice);
  CHECK(out > tiny);
}
#endif

TEST_CASE("what is supported, and in which type it is accumulated") {
  for (const DType dtype : all_dtypes()) {
    CHECK_FALSE(supports(dtype, ReduceOp::kAverage));
    for (const ReduceOp op : kOps) CHECK(supports(dtype, op));
    const bool half = dtype == DType::kFloat16 || dtype == DType::kBfloat16;
    CHECK(accumulator_of(dtype) == (half ? DType::kFloat32 : dtype));
  }
  CHECK_FALSE(supports(static_cast<DType>(kDTypeCount), ReduceOp::kSum));
  CHECK_FALSE(supports(DType::kFloat32, static_cast<ReduceOp>(2)));
  CHECK(instruction_set() == runnable_tables().back()->name);
  CHECK(runnable_tables().front() == baseline_table());
}

#if defined(__x86_64__) && !defined(__clang__)
TEST_CASE("the processor has the instruction sets that GCC's runtime library finds") {
  const CpuFeatures found = cpu_features();
  CHECK(found.sse4_2 == (__builtin_cpu_supports("sse4.2") != 0));
  CHECK(found.avx2 == (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")));
  CHECK(found.avx512 == (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")));
  CHECK(found.avx512_bf16 == (found.avx512 && __builtin_cpu_supports("avx512bf16")));
  if (found.avx512_bf16) CHECK(instruction_set() == "avx512_bf16");
}
#endif

TEST_CASE("types have NumPy's sizes and names") {
  constexpr std::array<std::size_t, kDTypeCount> kSizes = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1, 2, 4, 8};
  constexpr std::array<std::string_view, kDTypeCount> kNames = {
      "uint8",   "int8",    "int16", "int32",  "int64",  "float16", "bfloat16",
      "float32", "float64", "bool",  "uint16", "uint32", "uint64"};
  for (const DType dtype : all_dtypes()) {
    CHECK(item_size(dtype) == kSizes[static_cast<int>(dtype)]);
    CHECK(std::string(name_of(dtype)) == std::string(kNames[static_cast<int>(dtype)]));
  }
  CHECK(std::string(name_of(OpKind::kBarrier)) == "barrier");
  CHECK(std::string(name_of(ReduceOp::kProduct)) == "Product");
  CHECK(element_count(Shape{}) == 1);
  CHECK(element_count(Shape{3, 0, 5}) == 0);
  CHECK(element_count(Shape{3, 4, 5}) == 60);
}
