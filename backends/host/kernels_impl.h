// The kernels of one instruction set: included once by each kernels_<set>.cc, after
// the pragma that selects it. All is in an anonymous namespace and calls no library
// function, so that no symbol compiled for one machine is linked into code for another.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "kernels_table.h"

#define POLYHVD_INLINE [[gnu::always_inline]] inline

namespace polyhvd::host {
namespace {

// GCC 12 does not define __AVX2__ and the like for the pragma, hence this macro.
#if !defined(POLYHVD_VECTOR_BYTES)
#define POLYHVD_VECTOR_BYTES 16
#endif
constexpr std::size_t kWidth = POLYHVD_VECTOR_BYTES;

// A block is what one step of a kernel holds in registers, as accumulators.
constexpr int kParts = 4;
constexpr std::size_t kDoubles = kWidth / sizeof(double);

template <class T, std::size_t bytes = kWidth>
struct VectorOf {
  typedef T Type __attribute__((vector_size(bytes)));
};
template <class T, std::size_t bytes = kWidth>
using Vec = typename VectorOf<T, bytes>::Type;

using Float = Vec<float>;
using Word = Vec<std::uint32_t>;
using Half = Vec<std::uint16_t, kWidth / 2>;

template <class T>
struct Block {
  using Item = T;
  static constexpr std::size_t kLanes = kParts * kWidth / sizeof(T);
  Vec<T> part[kParts];
};

// Through a type of any alignment that aliases all: a memcpy would do, were it not
// that GCC splits one of 16 bytes in two.
template <class V>
struct InMemory {
  typedef V Type __attribute__((aligned(1), may_alias));
};

template <class V>
POLYHVD_INLINE V load(const std::byte* from) {
  return *reinterpret_cast<const typename InMemory<V>::Type*>(from);
}

template <class V>
POLYHVD_INLINE void store(std::byte* to, V v) {
  *reinterpret_cast<typename InMemory<V>::Type*>(to) = v;
}

// Which payload an operation on two NaNs returns depends on the order in which the
// compiler puts its operands, so every NaN result becomes the same one.
template <class T>
POLYHVD_INLINE Vec<T> canonical(Vec<T> v) {
  if constexpr (std::is_floating_point_v<T>) {
    constexpr T kNaN = std::numeric_limits<T>::quiet_NaN();
    return v == v ? v : Vec<T>{} + kNaN;
  } else {
    return v;
  }
}

// ---- Conversions. Integers only where a flag of the machine could matter. ----

POLYHVD_INLINE Float widen_bfloat16(Word bits) { return Float(bits << 16); }

// The upper half of each word is the result; the lower half is left over.
POLYHVD_INLINE Word round_to_bfloat16(Float v) {
  const Word bits = Word(v);
  const Word rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  return v == v ? rounded : Word{} + 0x7fc00000u;
}

// F. Giesen, "Half to float done quic(k)": rebias the exponent; a subtraction
// of normal numbers normalises the denormal ones.
[[maybe_unused]] POLYHVD_INLINE Float widen_float16(Word bits) {
  const Word magnitude = (bits & 0x7fffu) << 13;
  const Word exponent = magnitude & 0x0f800000u;
  const Word normal = magnitude + (112u << 23);
  const Word infinite = magnitude + (224u << 23);
  const Word denormal = Word(Float(magnitude + (113u << 23)) - 0x1p-14f);
  const Word result = exponent == 0x0f800000u ? infinite : (exponent == 0u ? denormal : normal);
  return Float(result | ((bits & 0x8000u) << 16));
}

// Float to half of the same author. Takes canonical NaNs.
[[maybe_unused]] POLYHVD_INLINE Word narrow_to_float16(Float v) {
  const Word sign = Word(v) & 0x80000000u;
  const Word magnitude = Word(v) ^ sign;
  const Word special = magnitude > 0x7f800000u ? Word{} + 0x7e00u : Word{} + 0x7c00u;
  const Word denormal = Word(Float(magnitude) + 0.5f) - 0x3f000000u;
  const Word odd = (magnitude >> 13) & 1u;
  const Word normal = (magnitude - (112u << 23) + 0xfffu + odd) >> 13;
  const Word result =
      magnitude >= (143u << 23) ? special : (magnitude < (113u << 23) ? denormal : normal);
  return result | (sign >> 16);
}

// ---- Codecs: how elements in memory become a block and a block becomes elements. ----

template <class T>
struct Plain {
  using Item = T;
  using Stored = T;
  using Packed = Block<T>;
  static constexpr bool kBool = false;

  POLYHVD_INLINE static void read(const std::byte* from, Block<T>& block) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) block.part[i] = load<Vec<T>>(from + i * kWidth);
  }
  POLYHVD_INLINE static void pack(const Block<T>& block, Packed& packed) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) packed.part[i] = canonical<T>(block.part[i]);
  }
  POLYHVD_INLINE static void write(std::byte* to, const Packed& packed) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) store(to + i * kWidth, packed.part[i]);
  }
};

// Any byte but 0 is true, and true is written as 1.
struct Bool : Plain<std::uint8_t> {
  static constexpr bool kBool = true;
  using Bytes = Vec<std::uint8_t>;

  POLYHVD_INLINE static void read(const std::byte* from, Block<std::uint8_t>& block) {
    Plain::read(from, block);
    pack(block, block);
  }
  POLYHVD_INLINE static void pack(const Block<std::uint8_t>& block, Packed& packed) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) packed.part[i] = Bytes(block.part[i] != 0) & 1;
  }
};

// Half types in the order of memory, for partial results, which are floats.
template <class Format>
struct InOrder {
  using Item = float;
  using Stored = std::uint16_t;
  static constexpr bool kBool = false;
  struct Packed {
    Half part[kParts];
  };

  POLYHVD_INLINE static void read(const std::byte* from, Block<float>& block) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i)
      block.part[i] = Format::widen(load<Half>(from + i * sizeof(Half)));
  }
  POLYHVD_INLINE static void pack(const Block<float>& block, Packed& packed) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) packed.part[i] = Format::narrow(block.part[i]);
  }
  POLYHVD_INLINE static void write(std::byte* to, const Packed& packed) {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) store(to + i * sizeof(Half), packed.part[i]);
  }
};

// Half types with the even elements of a vector in one accumulator and the odd
// ones in the next: only masks and shifts, no shuffles.
template <class Format>
struct EvenOdd {
  using Item = float;
  using Stored = std::uint16_t;
  static constexpr bool kBool = false;
  struct Packed {
    Word part[kParts / 2];
  };

  POLYHVD_INLINE static void read(const std::byte* from, Block<float>& block) {
#pragma GCC unroll 2
    for (int i = 0; i < kParts / 2; ++i) {
      const Word pair = load<Word>(from + i * kWidth);
      block.part[2 * i] = Format::widen_even(pair);
      block.part[2 * i + 1] = Format::widen_odd(pair);
    }
  }
  POLYHVD_INLINE static void pack(const Block<float>& block, Packed& packed) {
#pragma GCC unroll 2
    for (int i = 0; i < kParts / 2; ++i)
      packed.part[i] = Format::narrow_pair(block.part[2 * i], block.part[2 * i + 1]);
  }
  POLYHVD_INLINE static void write(std::byte* to, const Packed& packed) {
#pragma GCC unroll 2
    for (int i = 0; i < kParts / 2; ++i) store(to + i * kWidth, packed.part[i]);
  }
};

struct Bfloat16 {
  POLYHVD_INLINE static Float widen(Half bits) {
    return widen_bfloat16(__builtin_convertvector(bits, Word));
  }
  POLYHVD_INLINE static Half narrow(Float v) {
    return __builtin_convertvector(round_to_bfloat16(v) >> 16, Half);
  }
  POLYHVD_INLINE static Float widen_even(Word pair) { return widen_bfloat16(pair); }
  POLYHVD_INLINE static Float widen_odd(Word pair) { return Float(pair & 0xffff0000u); }
  POLYHVD_INLINE static Word narrow_pair(Float even, Float odd) {
#if defined(POLYHVD_AVX512_BF16)
    // The instruction takes denormal numbers for zeros and keeps parts of a NaN's
    // payload, so blocks that hold either go the long way.
    constexpr int kNanOrDenormal = 0x01 | 0x20 | 0x80;
    const __mmask16 found = _mm512_fpclass_ps_mask(__m512(even), kNanOrDenormal) |
                            _mm512_fpclass_ps_mask(__m512(odd), kNanOrDenormal);
    if (found == 0) [[likely]] {
      using Halves = Vec<std::uint16_t>;
      const Halves halves = Halves(_mm512_cvtne2ps_pbh(__m512(odd), __m512(even)));
      return Word(__builtin_shufflevector(halves, halves, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                          6, 22, 7, 23, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13,
                                          29, 14, 30, 15, 31));
    }
#endif
    return (round_to_bfloat16(even) >> 16) | (round_to_bfloat16(odd) & 0xffff0000u);
  }
};

struct Float16 {
#if POLYHVD_VECTOR_BYTES == 64
  // The forms with a mask: GCC 12 warns of its own headers' unmasked ones.
  POLYHVD_INLINE static Float widen(Half bits) {
    return Float(_mm512_maskz_cvtph_ps(0xffff, __m256i(bits)));
  }
  POLYHVD_INLINE static Half narrow(Float v) {
    const __m512 in = __m512(canonical<float>(v));
    return Half(_mm512_maskz_cvtps_ph(0xffff, in, _MM_FROUND_TO_NEAREST_INT));
  }
#elif POLYHVD_VECTOR_BYTES == 32
  POLYHVD_INLINE static Float widen(Half bits) { return Float(_mm256_cvtph_ps(__m128i(bits))); }
  POLYHVD_INLINE static Half narrow(Float v) {
    return Half(_mm256_cvtps_ph(__m256(canonical<float>(v)), _MM_FROUND_TO_NEAREST_INT));
  }
#else
  POLYHVD_INLINE static Float widen(Half bits) {
    return widen_float16(__builtin_convertvector(bits, Word));
  }
  POLYHVD_INLINE static Half narrow(Float v) {
    return __builtin_convertvector(narrow_to_float16(canonical<float>(v)), Half);
  }
  POLYHVD_INLINE static Float widen_even(Word pair) { return widen_float16(pair); }
  POLYHVD_INLINE static Float widen_odd(Word pair) { return widen_float16(pair >> 16); }
  POLYHVD_INLINE static Word narrow_pair(Float even, Float odd) {
    return narrow_to_float16(canonical<float>(even)) |
           (narrow_to_float16(canonical<float>(odd)) << 16);
  }
#endif
};

#if POLYHVD_VECTOR_BYTES > 16
using PackedFloat16 = InOrder<Float16>;
#else
using PackedFloat16 = EvenOdd<Float16>;
#endif
using PackedBfloat16 = EvenOdd<Bfloat16>;

// ---- Arithmetic ----

template <class T, bool = std::is_integral_v<T>>
struct WrappingOf {
  using Type = T;
};
template <class T>
struct WrappingOf<T, true> {
  using Type = std::make_unsigned_t<T>;
};

template <ReduceOp op, class T>
POLYHVD_INLINE Vec<T> apply(Vec<T> a, Vec<T> b) {
  using Wrapping = Vec<typename WrappingOf<T>::Type>;
  if constexpr (op == ReduceOp::kSum) {
    return Vec<T>(Wrapping(a) + Wrapping(b));
  } else if constexpr (op == ReduceOp::kProduct) {
    return Vec<T>(Wrapping(a) * Wrapping(b));
  } else {
    // A NaN in `a` fails the comparison and stays; a tie (of zeros) keeps `a`.
    Vec<T> chosen;
    if constexpr (op == ReduceOp::kMin) chosen = b < a ? b : a;
    if constexpr (op == ReduceOp::kMax) chosen = b > a ? b : a;
    if constexpr (std::is_floating_point_v<T>) chosen = b == b ? chosen : b;
    return chosen;
  }
}

// Towards zero; beyond the range of T to its nearest end, and NaN to its lowest.
template <class T>
POLYHVD_INLINE Vec<T, sizeof(T) * kDoubles> truncate(Vec<double> v) {
  using Result = Vec<T, sizeof(T) * kDoubles>;
  constexpr T kLeast = std::numeric_limits<T>::min();
  constexpr T kMost = std::numeric_limits<T>::max();
  const Vec<double> least = Vec<double>{} + static_cast<double>(kLeast);
  v = v > least ? v : least;
  if constexpr (sizeof(T) == 8) {
    // One more than the most, which is not a double itself.
    constexpr double kBound = std::is_signed_v<T> ? 0x1p63 : 0x1p64;
    const Result inside = __builtin_convertvector(v < kBound ? v : Vec<double>{}, Result);
    return v < kBound ? inside : Result{} + kMost;
  } else {
    using Wide = std::conditional_t<std::is_same_v<T, std::uint32_t>, std::uint32_t, int>;
    const Vec<double> most = Vec<double>{} + static_cast<double>(kMost);
    v = v < most ? v : most;
    return __builtin_convertvector(__builtin_convertvector(v, Vec<Wide, 4 * kDoubles>), Result);
  }
}

// Not inlined: it is long, and scaled integers are rare.
template <class T>
[[gnu::noinline]] void scale_integers(Block<T>& block, double factor) {
  using Items = Vec<T, sizeof(T) * kDoubles>;
  std::byte* items = reinterpret_cast<std::byte*>(&block);
  for (std::size_t i = 0; i < sizeof block; i += sizeof(Items)) {
    const Vec<double> v = __builtin_convertvector(load<Items>(items + i), Vec<double>);
    store(items + i, truncate<T>(v * factor));
  }
}

template <class T>
POLYHVD_INLINE void scale(Block<T>& block, double factor) {
  if constexpr (std::is_integral_v<T>) {
    Block<T> in_memory = block;
    scale_integers(in_memory, factor);
    block = in_memory;
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) block.part[i] *= static_cast<T>(factor);
  }
}

// A whole block of a source, where it lies.
template <class In>
struct WholeBlock {
  const KernelJob& job;
  std::size_t at;

  POLYHVD_INLINE void read(std::size_t source, Block<typename In::Item>& block) const {
    In::read(job.sources[source] + at * sizeof(typename In::Stored), block);
  }
};

// The last elements of a source, less than a block, followed by zeros.
template <class In>
struct PaddedBlock {
  const KernelJob& job;
  std::size_t at;

  POLYHVD_INLINE void read(std::size_t source, Block<typename In::Item>& block) const {
    constexpr std::size_t kItemBytes = sizeof(typename In::Stored);
    std::byte padded[Block<typename In::Item>::kLanes * kItemBytes] = {};
    __builtin_memcpy(padded, job.sources[source] + at * kItemBytes, (job.count - at) * kItemBytes);
    In::read(padded, block);
  }
};

template <ReduceOp op, class T, class Reader>
POLYHVD_INLINE void accumulate(const KernelJob& job, const Reader& reader, Block<T>& total) {
  const double pre = job.pre;
  const std::size_t source_count = job.source_count;
  reader.read(0, total);
  if (pre != 1.0) scale(total, pre);
  for (std::size_t s = 1; s < source_count; ++s) {
    Block<T> term;
    reader.read(s, term);
    if (pre != 1.0) scale(term, pre);
#pragma GCC unroll 4
    for (int i = 0; i < kParts; ++i) total.part[i] = apply<op, T>(total.part[i], term.part[i]);
  }
  if (job.post != 1.0) scale(total, job.post);
}

// One pass over memory. The last, incomplete block goes through padded buffers
// and the same instructions, so no element is ever computed in another way.
template <class In, class Out, ReduceOp op>
void run(const KernelJob& by_reference) {
  using T = typename In::Item;
  constexpr std::size_t kLanes = Block<T>::kLanes;
  constexpr std::size_t kOutBytes = sizeof(typename Out::Stored);
  const KernelJob job = by_reference;
  Block<T> total;
  typename Out::Packed packed;

  std::size_t at = 0;
  for (; at + kLanes <= job.count; at += kLanes) {
    accumulate<op>(job, WholeBlock<In>{job, at}, total);
    Out::pack(total, packed);
    Out::write(job.out + at * kOutBytes, packed);
    if (job.copy != nullptr) Out::write(job.copy + at * kOutBytes, packed);
  }

  const std::size_t rest_bytes = (job.count - at) * kOutBytes;
  if (rest_bytes == 0) return;
  std::byte padded[kLanes * kOutBytes];
  accumulate<op>(job, PaddedBlock<In>{job, at}, total);
  Out::pack(total, packed);
  Out::write(padded, packed);
  __builtin_memcpy(job.out + at * kOutBytes, padded, rest_bytes);
  if (job.copy != nullptr) __builtin_memcpy(job.copy + at * kOutBytes, padded, rest_bytes);
}

// ---- The table ----

template <class In, class Out>
constexpr void fill(Kernel (&row)[kKernelOpCount]) {
  // Bools are 0 or 1 here, so that max is "or" and min is "and".
  constexpr ReduceOp kSum = In::kBool ? ReduceOp::kMax : ReduceOp::kSum;
  constexpr ReduceOp kProduct = In::kBool ? ReduceOp::kMin : ReduceOp::kProduct;
  row[kernel_column(ReduceOp::kSum)] = run<In, Out, kSum>;
  row[kernel_column(ReduceOp::kMin)] = run<In, Out, ReduceOp::kMin>;
  row[kernel_column(ReduceOp::kMax)] = run<In, Out, ReduceOp::kMax>;
  row[kernel_column(ReduceOp::kProduct)] = run<In, Out, kProduct>;
}

template <class Codec>
constexpr void fill_native(KernelTable& table, DType dtype) {
  const int row = static_cast<int>(dtype);
  fill<Codec, Codec>(table.reduce[row]);
  fill<Codec, Codec>(table.to_partial[row]);
  fill<Codec, Codec>(table.from_partial[row]);
}

template <class Fast, class Ordered>
constexpr void fill_half(KernelTable& table, DType dtype) {
  const int row = static_cast<int>(dtype);
  fill<Fast, Fast>(table.reduce[row]);
  fill<Ordered, Plain<float>>(table.to_partial[row]);
  fill<Plain<float>, Ordered>(table.from_partial[row]);
}

constexpr KernelTable make_table(const char* name) {
  KernelTable table{};
  table.name = name;
  fill_native<Plain<std::uint8_t>>(table, DType::kUint8);
  fill_native<Plain<std::int8_t>>(table, DType::kInt8);
  fill_native<Plain<std::int16_t>>(table, DType::kInt16);
  fill_native<Plain<std::int32_t>>(table, DType::kInt32);
  fill_native<Plain<std::int64_t>>(table, DType::kInt64);
  fill_half<PackedFloat16, InOrder<Float16>>(table, DType::kFloat16);
  fill_half<PackedBfloat16, InOrder<Bfloat16>>(table, DType::kBfloat16);
  fill_native<Plain<float>>(table, DType::kFloat32);
  fill_native<Plain<double>>(table, DType::kFloat64);
  fill_native<Bool>(table, DType::kBool);
  fill_native<Plain<std::uint16_t>>(table, DType::kUint16);
  fill_native<Plain<std::uint32_t>>(table, DType::kUint32);
  fill_native<Plain<std::uint64_t>>(table, DType::kUint64);
  return table;
}

}  // namespace
}  // namespace polyhvd::host
