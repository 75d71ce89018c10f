// Sketches by every instruction set that this machine runs, against one written from
// sketch.h alone, an element at a time.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "host/kernels_table.h"
#include "host/sketch.h"
#include "host/sketch_table.h"
#include "kernel_oracle.h"

namespace {

using namespace polyhvd;
using namespace polyhvd::host;
using oracle::Bytes;

constexpr std::array<std::size_t, 12> kCounts = {0,   1,   63,   64,   65,   127,
                                                 128, 200, 2048, 2049, 4096, 5001};
constexpr std::array<std::uint64_t, 5> kBegins = {0, 1, 64, 127, (std::uint64_t{1} << 40) + 7};

template <class T>
double at(const Bytes& bytes, std::size_t i) {
  T value;
  std::memcpy(&value, bytes.data() + i * sizeof value, sizeof value);
  return static_cast<double>(value);
}

double element(DType dtype, const Bytes& bytes, std::size_t i) {
  switch (dtype) {
    case DType::kUint8:
      return at<std::uint8_t>(bytes, i);
    case DType::kInt8:
      return at<std::int8_t>(bytes, i);
    case DType::kInt16:
      return at<std::int16_t>(bytes, i);
    case DType::kInt32:
      return at<std::int32_t>(bytes, i);
    case DType::kInt64:
      return at<std::int64_t>(bytes, i);
    case DType::kUint16:
      return at<std::uint16_t>(bytes, i);
    case DType::kUint32:
      return at<std::uint32_t>(bytes, i);
    case DType::kUint64:
      return at<std::uint64_t>(bytes, i);
    case DType::kFloat32:
      return at<float>(bytes, i);
    case DType::kFloat64:
      return at<double>(bytes, i);
    case DType::kBool:
      return bytes[i] != std::byte{0} ? 1.0 : 0.0;
    case DType::kFloat16:
    case DType::kBfloat16:
      break;
  }
  std::uint16_t bits;
  std::memcpy(&bits, bytes.data() + 2 * i, 2);
  const auto& format = dtype == DType::kFloat16 ? oracle::kFloat16Format : oracle::kBfloat16Format;
  return format.decode(bits);
}

Sketch expected(DType dtype, const Bytes& from, std::size_t count, std::uint64_t begin,
                const Bytes* less) {
  Sketch made;
  std::array<double, kSketchColumns> squares{};
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t row = (begin + i) / kSketchColumns;
    const std::size_t column = (begin + i) % kSketchColumns;
    double value = element(dtype, from, i);
    if (less != nullptr) value -= element(dtype, *less, i);
    if (!std::isfinite(value)) {
      ++made.not_finite;
      continue;
    }
    squares[column] += value * value;
    made.columns[column] += (signs_of_row(row) >> column & 1) != 0 ? -value : value;
  }
  for (const double square : squares) made.square += square;
  return made;
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

bool same(const Sketch& a, const Sketch& b) {
  for (std::size_t i = 0; i < kSketchColumns; ++i)
    if (!same(a.columns[i], b.columns[i])) return false;
  return same(a.square, b.square) && a.not_finite == b.not_finite;
}

// Any bits: among floats there are NaNs, infinities and denormal numbers. Or moderate floats.
Bytes random_elements(DType dtype, std::size_t count, bool is_moderate, std::mt19937& random) {
  Bytes bytes(count * item_size(dtype));
  for (std::byte& b : bytes) b = std::byte{static_cast<unsigned char>(random())};
  std::normal_distribution<double> moderate(0, 4);
  for (std::size_t i = 0; is_moderate && i < count; ++i) {
    const double value = moderate(random);
    const float narrow = static_cast<float>(value);
    if (dtype == DType::kFloat64) std::memcpy(bytes.data() + 8 * i, &value, 8);
    if (dtype == DType::kFloat32) std::memcpy(bytes.data() + 4 * i, &narrow, 4);
    if (dtype != DType::kFloat16 && dtype != DType::kBfloat16) continue;
    const auto& format =
        dtype == DType::kFloat16 ? oracle::kFloat16Format : oracle::kBfloat16Format;
    const std::uint16_t half = format.encode(value);
    std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  return bytes;
}

// At an odd address, with bytes around it that nothing may touch.
class Guarded {
 public:
  explicit Guarded(const Bytes& held) : bytes_(1, kGuard) {
    bytes_.insert(bytes_.end(), held.begin(), held.end());
    bytes_.insert(bytes_.end(), 65, kGuard);
  }
  std::byte* data() { return bytes_.data() + 1; }
  bool holds(const Bytes& wanted) const { return bytes_ == Guarded(wanted).bytes_; }

 private:
  static constexpr std::byte kGuard{0xa5};
  Bytes bytes_;
};

void check(DType dtype, bool is_moderate) {
  std::mt19937 random(23);
  for (const std::size_t count : kCounts)
    for (const std::uint64_t begin : kBegins)
      for (const bool has_less : {false, true}) {
        const Bytes from = random_elements(dtype, count, is_moderate, random);
        const Bytes less = random_elements(dtype, count, is_moderate, random);
        const Sketch wanted = expected(dtype, from, count, begin, has_less ? &less : nullptr);
        for (const SketchTable* table : runnable_sketches()) {
          Guarded odd(from);
          Guarded copy(Bytes(from.size()));
          const Sketch made = sketch_by(*table, dtype, odd.data(), count, begin,
                                        has_less ? less.data() : nullptr, copy.data());
          CHECK(odd.holds(from));
          CHECK(copy.holds(from));
          if (same(made, wanted)) continue;
          FAIL(std::string(table->name) << " " << name_of(dtype) << " count " << count << " begin "
                                        << begin << " less " << has_less);
        }
      }
}

}  // namespace

TEST_CASE("sketches of every instruction set have the bits of the definition") {
  for (int d = 0; d < kDTypeCount; ++d)
    for (const bool is_moderate : {false, true}) check(static_cast<DType>(d), is_moderate);
}

TEST_CASE("sketches know the instruction sets that the reductions have") {
  CHECK(runnable_sketches().size() >= std::min<std::size_t>(runnable_tables().size(), 3));
  CHECK(std::string(runnable_sketches().front()->name) == "baseline");
}

TEST_CASE("a sketch of parts is the sum of the parts' sketches") {
  std::vector<float> whole(1000);
  for (std::size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<float>(i % 31);  // exact
  const auto* bytes = reinterpret_cast<const std::byte*>(whole.data());
  const auto of = [&](std::size_t begin, std::size_t end) {
    return sketch_of(DType::kFloat32, bytes + 4 * begin, end - begin, begin, nullptr, nullptr);
  };
  const Sketch all = of(0, 1000);
  const Sketch one = of(0, 333);
  const Sketch two = of(333, 1000);
  CHECK(all.square == one.square + two.square);
  for (std::size_t i = 0; i < kSketchColumns; ++i)
    CHECK(all.columns[i] == one.columns[i] + two.columns[i]);
}

TEST_CASE("signs are as many pluses as minuses, in columns, rows and pairs of rows") {
  constexpr int kRows = 4096;
  std::array<int, kSketchColumns> columns{};
  int together = 0;
  for (int row = 0; row < kRows; ++row) {
    const std::uint64_t signs = signs_of_row(static_cast<std::uint64_t>(row));
    for (std::size_t i = 0; i < kSketchColumns; ++i) columns[i] += signs >> i & 1 ? 1 : -1;
    together +=
        __builtin_popcountll(signs ^ signs_of_row(static_cast<std::uint64_t>(row) + 1)) - 32;
  }
  for (const int excess : columns) CHECK(std::abs(excess) < 5 * 64);  // five deviations
  CHECK(std::abs(together) < 5 * 4 * 64);
}

TEST_CASE("what is finite is counted as such, also where its squares are not") {
  const std::array<double, 3> values = {1e200, std::numeric_limits<double>::infinity(), -2.0};
  const Sketch made = sketch_of(DType::kFloat64, reinterpret_cast<const std::byte*>(values.data()),
                                3, 0, nullptr, nullptr);
  CHECK(made.not_finite == 1);
  CHECK(std::isinf(made.square));
  CHECK(made.columns[1] == 0.0);
  CHECK(std::fabs(made.columns[2]) == 2.0);
}

#if defined(__x86_64__)
TEST_CASE("a sketch neither minds nor changes the thread's flush-to-zero mode") {
  std::vector<double> tiny(200, 1e-310);
  const auto* bytes = reinterpret_cast<const std::byte*>(tiny.data());
  const Sketch wanted = sketch_of(DType::kFloat64, bytes, 200, 0, nullptr, nullptr);
  const unsigned before = _mm_getcsr();
  const unsigned flushing = before | 0x8040;
  _mm_setcsr(flushing);
  const Sketch made = sketch_of(DType::kFloat64, bytes, 200, 0, nullptr, nullptr);
  const unsigned after = _mm_getcsr();
  _mm_setcsr(before);
  CHECK(after == flushing);
  CHECK(same(made, wanted));
  CHECK(made.columns[63] != 0.0);  // of three elements
}
#endif
