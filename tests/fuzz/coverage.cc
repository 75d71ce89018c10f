// Which edges of the instrumented sources an input passes. GCC calls
// __sanitizer_cov_trace_pc in every basic block (-fsanitize-coverage=trace-pc).
#include <array>
#include <bit>

#include "fuzz.h"

namespace polyhvd::fuzz {
namespace {

constexpr std::size_t kPlaces = kEdgeCount / 8;  // a place has eight classes of counts
std::array<std::uint8_t, kPlaces> counts{};
// No vector: this runs inside of what is measured, and until the very end.
std::array<std::uint32_t, kPlaces> passed{};
std::size_t passed_count = 0;
std::uintptr_t previous = 0;

}  // namespace

void begin_coverage() noexcept {
  for (std::size_t i = 0; i < passed_count; ++i) counts[passed[i]] = 0;
  passed_count = 0;
  previous = 0;
}

std::vector<std::uint32_t> edges_passed(bool counted) {
  std::vector<std::uint32_t> edges;
  edges.reserve(passed_count);
  for (std::size_t i = 0; i < passed_count; ++i) {
    const std::uint32_t place = passed[i];
    const auto magnitude = static_cast<std::uint32_t>(std::bit_width(counts[place])) - 1;
    edges.push_back(8 * place + (counted ? magnitude : 0));
  }
  return edges;
}

}  // namespace polyhvd::fuzz

extern "C" void __sanitizer_cov_trace_pc() {
  using namespace polyhvd::fuzz;
  const auto here = reinterpret_cast<std::uintptr_t>(__builtin_return_address(0)) -
                    reinterpret_cast<std::uintptr_t>(&begin_coverage);  // wherever it is loaded
  const std::uintptr_t mixed = (here ^ (previous >> 1)) * 0x9e3779b97f4a7c15u;
  const auto place = static_cast<std::uint32_t>(mixed >> 48) % kPlaces;
  previous = here;
  if (counts[place] == 0) passed[passed_count++] = place;
  if (counts[place] < 255) ++counts[place];
}
