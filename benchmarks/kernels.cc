// Bandwidth of the reductions, per element type and instruction set: two sources
// summed, written to `out` (one of them) and to `copy`. Needs no ranks.
//
//   g++ -std=c++20 -O3 -ffp-contract=off -Ipolyhvd/csrc -Ibackends
//       benchmarks/kernels.cc backends/host/kernels*.cc polyhvd/csrc/control/types.cc
#include "host/kernels.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "host/kernels_table.h"

namespace {

using namespace polyhvd;
using namespace polyhvd::host;

constexpr int kSamples = 7;
constexpr double kSampleSeconds = 0.02;

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Seconds of one call, the least of several samples.
template <class Call>
double time_s(const Call& call) {
  call();
  std::size_t calls = 1;
  for (double seconds = 0; seconds < kSampleSeconds / 4; calls *= 2) {
    const double start = now_s();
    for (std::size_t i = 0; i < calls; ++i) call();
    seconds = now_s() - start;
  }
  double best = 1e9;
  for (int sample = 0; sample < kSamples; ++sample) {
    const double start = now_s();
    for (std::size_t i = 0; i < calls; ++i) call();
    best = std::min(best, (now_s() - start) / static_cast<double>(calls));
  }
  return best;
}

void plain_float_loop(const float* a, const float* b, std::size_t count, float* out, float* copy) {
  for (std::size_t i = 0; i < count; ++i) copy[i] = out[i] = a[i] + b[i];
}

#if defined(__x86_64__) && !defined(__clang__)
// The same loop as the compiler vectorises it for AVX-512.
[[gnu::target("avx512f,prefer-vector-width=512")]] void plain_float_loop_avx512(
    const float* a, const float* b, std::size_t count, float* out, float* copy) {
#pragma GCC ivdep
  for (std::size_t i = 0; i < count; ++i) copy[i] = out[i] = a[i] + b[i];
}
#endif

// Zeros: they stay what they are, however often they are added in place. At
// `offset` bytes from a cache line: NumPy's arrays lie at 16, torch's at 0.
struct Arrays {
  Arrays(std::size_t bytes, std::size_t offset) : memory(3 * (bytes + kGap) + 128) {
    const std::size_t aligned = 64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
    a = memory.data() + aligned + offset;
    b = a + bytes + kGap;
    copy = b + bytes + kGap;
  }
  static constexpr std::size_t kGap = 64 * 19;
  std::vector<std::byte> memory;
  std::byte* a;
  std::byte* b;
  std::byte* copy;
};

void print(const char* set, const char* what, std::size_t bytes, std::size_t count, double seconds,
           double base_rate) {
  const double rate = static_cast<double>(count) / seconds;
  std::printf("%-12s %-20s %8zu KB %8.1f GB/s %8.2f Gelem/s %6.2fx\n", set, what, bytes / 1024,
              4.0 * static_cast<double>(bytes) / seconds * 1e-9, rate * 1e-9,
              base_rate > 0 ? rate / base_rate : 1.0);
}

double rate_of(const KernelTable& table, DType dtype, double pre, std::size_t bytes,
               std::size_t offset) {
  Arrays arrays(bytes, offset);
  const std::size_t count = bytes / item_size(dtype);
  const std::array<const std::byte*, 2> sources = {arrays.a, arrays.b};
  const KernelJob job{pre, 1.0, sources.data(), 2, count, arrays.a, arrays.copy};
  const Kernel kernel = table.reduce[static_cast<int>(dtype)][kernel_column(ReduceOp::kSum)];
  const double seconds = time_s([&] { kernel(job); });
  return static_cast<double>(count) / seconds;
}

void bench_size(std::size_t bytes, std::size_t offset) {
  std::printf("-- %zu KB each, %zu bytes past a cache line\n", bytes / 1024, offset);
  for (const KernelTable* table : runnable_tables()) {
    const double base = rate_of(*table, DType::kFloat32, 1.0, bytes, offset);
    for (int d = 0; d < kDTypeCount; ++d) {
      const DType dtype = static_cast<DType>(d);
      const std::size_t count = bytes / item_size(dtype);
      const double rate = rate_of(*table, dtype, 1.0, bytes, offset);
      print(table->name, name_of(dtype).data(), bytes, count, static_cast<double>(count) / rate,
            base);
    }
    for (const DType dtype : {DType::kInt32, DType::kFloat32}) {
      const std::size_t count = bytes / item_size(dtype);
      const double rate = rate_of(*table, dtype, 0.5, bytes, offset);
      const char* what = dtype == DType::kInt32 ? "int32 prescaled" : "float32 prescaled";
      print(table->name, what, bytes, count, static_cast<double>(count) / rate, base);
    }
  }
  Arrays arrays(bytes, offset);
  float* a = reinterpret_cast<float*>(arrays.a);
  float* b = reinterpret_cast<float*>(arrays.b);
  float* copy = reinterpret_cast<float*>(arrays.copy);
  const std::size_t count = bytes / sizeof(float);
  print("compiler", "plain float32 loop", bytes, count,
        time_s([&] { plain_float_loop(a, b, count, a, copy); }), 0);
#if defined(__x86_64__) && !defined(__clang__)
  if (__builtin_cpu_supports("avx512f"))
    print("compiler", "plain loop, avx512", bytes, count,
          time_s([&] { plain_float_loop_avx512(a, b, count, a, copy); }), 0);
#endif
}

}  // namespace

int main() {
  std::printf("this machine runs: %s; the last column compares elements/s with float32\n",
              instruction_set().data());
  for (const std::size_t kilobytes : {8, 64, 128, 256, 65536})
    for (const std::size_t offset : {0, 16}) bench_size(kilobytes * 1024, offset);
}
