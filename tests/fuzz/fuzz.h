// A fuzzer of the wire format that GCC alone can build: mutations that know where
// lengths stand, guided by the basic blocks that an input reaches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace polyhvd::fuzz {

using Random = std::mt19937_64;

// 0 to n - 1; n must not be 0.
inline std::size_t below(Random& random, std::size_t n) {
  return static_cast<std::size_t>(random() % n);
}

// ---- seeds.cc
// A name and a payload as the product writes it, for messages of every type.
std::vector<std::pair<std::string, std::string>> seed_payloads();

// ---- mutate.cc
// `base` with a few changes; `other` is spliced in sometimes.
std::string mutate(const std::string& base, const std::string& other, Random& random);

// ---- coverage.cc
// Forgets which edges were passed since the last call.
void begin_coverage() noexcept;
// Edges passed since then, as numbers below kEdgeCount, equal in every run.
// With `counted` an edge has other numbers when it was passed more often.
inline constexpr std::size_t kEdgeCount = std::size_t{1} << 19;
std::vector<std::uint32_t> edges_passed(bool counted);

// ---- oracle.cc
// Once, before the rest: what is allocated is counted from here on.
void begin_counting();
// A payload is refused with Failure(kInternal), or what is read of it is written as the
// same bytes; either way it costs no more memory than a small multiple of its size.
// Throws std::runtime_error where that does not hold.
void check_payload(const std::string& payload);
// Frames of these payloads, damaged on the way and cut anywhere: what comes out first is
// what went in, and then all of it or Failure(kPeerLost).
void check_stream(std::span<const std::string> payloads, Random& random);

}  // namespace polyhvd::fuzz
