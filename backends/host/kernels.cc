// Chooses the instruction set, once, and calls its kernels.
#include "kernels.h"

#include <array>

#include "control/cpu_features.h"
#include "float_mode.h"
#include "kernels_table.h"

namespace polyhvd::host {
namespace {

struct Tables {
  std::array<const KernelTable*, 4> tables{};
  std::size_t count = 0;

  void add(const KernelTable* table) noexcept {
    if (table != nullptr) tables[count++] = table;
  }
};

Tables find_runnable() noexcept {
  Tables found;
  found.add(baseline_table());
#if defined(__x86_64__)
  const CpuFeatures cpu = cpu_features();
  if (cpu.avx2) found.add(avx2_table());
  if (cpu.avx512) found.add(avx512_table());
  if (cpu.avx512_bf16) found.add(avx512_bf16_table());
#endif
  return found;
}

const KernelTable& best() noexcept {
  static const KernelTable& table = *runnable_tables().back();
  return table;
}

using Rows = Kernel[kDTypeCount][kKernelOpCount];

void call(const Rows& rows, DType dtype, ReduceOp op, const KernelJob& job) {
  const DefaultFloatMode mode;
  rows[static_cast<int>(dtype)][kernel_column(op)](job);
}

}  // namespace

std::span<const KernelTable* const> runnable_tables() noexcept {
  static const Tables found = find_runnable();
  return {found.tables.data(), found.count};
}

DType accumulator_of(DType dtype) noexcept {
  const bool half = dtype == DType::kFloat16 || dtype == DType::kBfloat16;
  return half ? DType::kFloat32 : dtype;
}

bool supports(DType dtype, ReduceOp op) noexcept {
  return static_cast<int>(dtype) < kDTypeCount && kernel_column(op) >= 0;
}

void reduce(DType dtype, ReduceOp op, Scale scale, std::span<const std::byte* const> sources,
            std::size_t count, std::byte* out, std::byte* copy) {
  call(best().reduce, dtype, op,
       {scale.pre, scale.post, sources.data(), sources.size(), count, out, copy});
}

void reduce_to_partial(DType dtype, ReduceOp op, double prescale,
                       std::span<const std::byte* const> sources, std::size_t count,
                       std::byte* partial) {
  call(best().to_partial, dtype, op,
       {prescale, 1.0, sources.data(), sources.size(), count, partial, nullptr});
}

void combine_partials(DType dtype, ReduceOp op, double postscale,
                      std::span<const std::byte* const> partials, std::size_t count, std::byte* out,
                      std::byte* copy) {
  call(best().from_partial, dtype, op,
       {1.0, postscale, partials.data(), partials.size(), count, out, copy});
}

std::string_view instruction_set() noexcept { return best().name; }

}  // namespace polyhvd::host
