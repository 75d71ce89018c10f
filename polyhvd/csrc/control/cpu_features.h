// Instruction sets that this processor and its operating system support.
//
// __builtin_cpu_supports would do the same, but reads a table of the compiler's runtime library,
// and in Zig's, with which wheels are built, that is a stub without any instruction set.
#pragma once

#if defined(__x86_64__)
#include <cpuid.h>

namespace polyhvd {

// Groups of extensions, as kernels need them.
struct CpuFeatures {
  bool sse4_2 = false;
  bool avx2 = false;         // and F16C
  bool avx512 = false;       // F, BW, DQ and VL
  bool avx512_bf16 = false;  // and avx512
};

// Asks the processor: Intel's Software Developer's Manual, volume 1, chapters 14 and 15.
inline CpuFeatures cpu_features() noexcept {
  CpuFeatures found;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return found;
  found.sse4_2 = (ecx & bit_SSE4_2) != 0;
  const bool f16c = (ecx & bit_F16C) != 0;
  if ((ecx & bit_OSXSAVE) == 0) return found;

  // Which registers the operating system saves when it switches threads.
  unsigned saved = 0, upper = 0;
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
  constexpr unsigned kYmm = 0x6, kZmm = 0xe6;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return found;
  constexpr unsigned kAvx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
  found.avx2 = (saved & kYmm) == kYmm && f16c && (ebx & bit_AVX2) != 0;
  found.avx512 = found.avx2 && (saved & kZmm) == kZmm && (ebx & kAvx512) == kAvx512;
  constexpr unsigned kBf16 = 1U << 5;
  found.avx512_bf16 =
      found.avx512 && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kBf16) != 0;
  return found;
}

}  // namespace polyhvd
#endif
