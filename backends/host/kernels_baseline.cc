// The kernels for what the compiler targets unasked: SSE2 on x86-64, NEON on
// 64-bit Arm. The reference for the other sets.
#include "kernels_impl.h"

namespace polyhvd::host {

const KernelTable* baseline_table() noexcept {
  static constexpr KernelTable kTable = make_table("baseline");
  return &kTable;
}

}  // namespace polyhvd::host
