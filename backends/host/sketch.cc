// Cuts a tensor into rows, and calls the sums of the machine's instruction set.
#include "sketch.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string_view>

#include "float_mode.h"
#include "kernels_table.h"
#include "sketch_table.h"

namespace polyhvd::host {
namespace {

// A block is what fits into the first cache with its copy.
constexpr std::size_t kRowsMax = 32;
constexpr std::size_t kBlock = kRowsMax * kSketchColumns;

struct Tables {
  std::array<const SketchTable*, 3> tables{};
  std::size_t count = 0;
};

Tables find_runnable() noexcept {
  Tables found;
  for (const SketchTable* table : {baseline_sketches(), avx2_sketches(), avx512_sketches()}) {
    if (table == nullptr) continue;
    const auto known = runnable_tables();  // by kernels.cc, which asks the machine
    const auto is_same = [&](const KernelTable* other) {
      return std::string_view(other->name) == table->name;
    };
    if (std::any_of(known.begin(), known.end(), is_same)) {
      found.tables[found.count++] = table;
    }
  }
  return found;
}

const SketchTable& best() noexcept {
  static const SketchTable& table = *runnable_sketches().back();
  return table;
}

// ---- Elements as doubles. Integers only where a flag of the machine could matter. ----

template <class T>
T read(const std::byte* from) noexcept {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

double widen_float16(std::uint16_t bits) noexcept {
  const std::uint64_t sign = std::uint64_t(bits >> 15) << 63;
  const std::uint64_t exponent = (bits >> 10) & 31u;
  const std::uint64_t fraction = bits & 1023u;
  if (exponent == 0) {
    const double magnitude = static_cast<double>(fraction) * 0x1p-24;
    return sign != 0 ? -magnitude : magnitude;
  }
  const std::uint64_t wide = exponent == 31 ? 2047 : exponent + (1023 - 15);
  return std::bit_cast<double>(sign | wide << 52 | fraction << 42);
}

template <class T>
void widen_all(const std::byte* from, std::size_t count, double* to) noexcept {
  for (std::size_t i = 0; i < count; ++i)
    to[i] = static_cast<double>(read<T>(from + i * sizeof(T)));
}

void widen(DType dtype, const std::byte* from, std::size_t count, double* to) noexcept {
  switch (dtype) {
    case DType::kBool:
      for (std::size_t i = 0; i < count; ++i) to[i] = from[i] != std::byte{0} ? 1.0 : 0.0;
      return;
    case DType::kFloat16:
      for (std::size_t i = 0; i < count; ++i)
        to[i] = widen_float16(read<std::uint16_t>(from + 2 * i));
      return;
    case DType::kBfloat16:
      for (std::size_t i = 0; i < count; ++i) {
        const std::uint32_t bits = std::uint32_t{read<std::uint16_t>(from + 2 * i)} << 16;
        to[i] = static_cast<double>(std::bit_cast<float>(bits));
      }
      return;
    case DType::kUint8:
      return widen_all<std::uint8_t>(from, count, to);
    case DType::kInt8:
      return widen_all<std::int8_t>(from, count, to);
    case DType::kUint16:
      return widen_all<std::uint16_t>(from, count, to);
    case DType::kInt16:
      return widen_all<std::int16_t>(from, count, to);
    case DType::kUint32:
      return widen_all<std::uint32_t>(from, count, to);
    case DType::kInt32:
      return widen_all<std::int32_t>(from, count, to);
    case DType::kUint64:
      return widen_all<std::uint64_t>(from, count, to);
    case DType::kInt64:
      return widen_all<std::int64_t>(from, count, to);
    case DType::kFloat32:
      return widen_all<float>(from, count, to);
    case DType::kFloat64:
      return widen_all<double>(from, count, to);
  }
}

// ---- Sums of one tensor ----

class Summing {
 public:
  Summing(DType dtype, const SketchTable& table, bool only_finite) noexcept
      : dtype_(dtype), size_(item_size(dtype)), table_(table), only_finite_(only_finite) {}

  // As sketch_of().
  void add_all(const std::byte* from, std::size_t count, std::uint64_t begin, const std::byte* less,
               std::byte* copy) noexcept {
    for (std::size_t done = 0; done < count;) {
      const std::uint64_t at = begin + done;
      const std::size_t column = at % kSketchColumns;
      const std::size_t remaining = count - done;
      const bool is_whole = column == 0 && remaining >= kSketchColumns;
      const std::size_t part = is_whole
                                   ? std::min(remaining / kSketchColumns * kSketchColumns, kBlock)
                                   : std::min(remaining, kSketchColumns - column);
      const std::byte* here = from + done * size_;
      const std::byte* there = less == nullptr ? nullptr : less + done * size_;
      if (copy != nullptr) std::memcpy(copy + done * size_, here, part * size_);
      if (is_whole && !only_finite_ && is_direct()) {
        add(dtype_ == DType::kFloat32, here, there, at / kSketchColumns, part / kSketchColumns);
      } else {
        add_widened(here, there, at / kSketchColumns, column, part);
      }
      done += part;
    }
  }

  Sketch result() const noexcept {
    Sketch made;
    made.not_finite = not_finite_;
    for (std::size_t i = 0; i < kSketchColumns; ++i) {
      made.square += squares_[i];
      // Which NaN comes out is the machine's choice.
      made.columns[i] =
          std::isnan(columns_[i]) ? std::numeric_limits<double>::quiet_NaN() : columns_[i];
    }
    if (std::isnan(made.square)) made.square = std::numeric_limits<double>::quiet_NaN();
    return made;
  }

 private:
  bool is_direct() const noexcept { return dtype_ == DType::kFloat32 || dtype_ == DType::kFloat64; }

  void add(bool is_float, const std::byte* from, const std::byte* less, std::uint64_t row,
           std::size_t rows) noexcept {
    std::uint64_t signs[kRowsMax];
    for (std::size_t i = 0; i < rows; ++i) signs[i] = signs_of_row(row + i);
    const SketchRows plain = is_float ? table_.floats : table_.doubles;
    const SketchRows lessened = is_float ? table_.floats_less : table_.doubles_less;
    (less == nullptr ? plain : lessened)({from, less, signs, rows, squares_, columns_});
  }

  // What is a part of a row, or of another type. Zeros around it change no sum.
  void add_widened(const std::byte* from, const std::byte* less, std::uint64_t row,
                   std::size_t column, std::size_t count) noexcept {
    const std::size_t rows = (column + count + kSketchColumns - 1) / kSketchColumns;
    double* values = block_ + column;
    std::fill(block_, values, 0.0);
    std::fill(values + count, block_ + rows * kSketchColumns, 0.0);
    widen(dtype_, from, count, values);
    if (less != nullptr) {
      widen(dtype_, less, count, other_);
      for (std::size_t i = 0; i < count; ++i) values[i] -= other_[i];
    }
    for (std::size_t i = 0; only_finite_ && i < count; ++i) {
      if (std::isfinite(values[i])) continue;
      values[i] = 0;
      ++not_finite_;
    }
    add(false, reinterpret_cast<const std::byte*>(block_), nullptr, row, rows);
  }

  const DType dtype_;
  const std::size_t size_;
  const SketchTable& table_;
  const bool only_finite_;
  std::uint64_t not_finite_ = 0;
  double squares_[kSketchColumns] = {};
  double columns_[kSketchColumns] = {};
  double block_[kBlock];
  double other_[kBlock];
};

}  // namespace

std::span<const SketchTable* const> runnable_sketches() noexcept {
  static const Tables found = find_runnable();
  return {found.tables.data(), found.count};
}

Sketch sketch_by(const SketchTable& table, DType dtype, const std::byte* from, std::size_t count,
                 std::uint64_t begin, const std::byte* less, std::byte* copy) noexcept {
  const DefaultFloatMode mode;
  Summing summing(dtype, table, false);
  summing.add_all(from, count, begin, less, copy);
  const Sketch made = summing.result();
  if (std::isfinite(made.square)) return made;
  Summing again(dtype, table, true);
  again.add_all(from, count, begin, less, nullptr);
  return again.result();
}

Sketch sketch_of(DType dtype, const std::byte* from, std::size_t count, std::uint64_t begin,
                 const std::byte* less, std::byte* copy) noexcept {
  return sketch_by(best(), dtype, from, count, begin, less, copy);
}

}  // namespace polyhvd::host
