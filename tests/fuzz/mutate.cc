// Changes to a payload: of bits, of lengths, of its end, and of its parts' order.
#include <algorithm>
#include <cstring>
#include <limits>

#include "fuzz.h"

namespace polyhvd::fuzz {
namespace {

constexpr std::size_t kPayloadBytesMax = 4096;

std::pair<std::size_t, std::size_t> range_of(const std::string& payload, Random& random) {
  const std::size_t from = below(random, payload.size());
  const std::size_t longest = std::min<std::size_t>(payload.size() - from, 64);
  return {from, 1 + below(random, longest)};
}

void flip_bits(std::string& payload, Random& random) {
  for (std::size_t flips = 1 + below(random, 4); flips > 0; --flips) {
    char& byte = payload[below(random, payload.size())];
    byte = static_cast<char>(byte ^ (1 << below(random, 8)));
  }
}

// Lengths and numbers are 32 or 64 bits, at any offset.
template <class Number>
void change_number(std::string& payload, Random& random) {
  if (payload.size() < sizeof(Number)) return;
  const std::size_t at = below(random, payload.size() - sizeof(Number) + 1);
  Number value;
  std::memcpy(&value, payload.data() + at, sizeof value);
  const Number largest = std::numeric_limits<Number>::max();
  const Number left = static_cast<Number>(payload.size() - at);
  const Number choices[] = {0,
                            1,
                            static_cast<Number>(value + 1),
                            static_cast<Number>(value - 1),
                            static_cast<Number>(value * 2),
                            left,
                            static_cast<Number>(left / 4),
                            largest,
                            static_cast<Number>(largest / 2 + 1),
                            static_cast<Number>(largest / sizeof(Number)),
                            static_cast<Number>(Number{1} << below(random, 8 * sizeof(Number)))};
  value = choices[below(random, std::size(choices))];
  std::memcpy(payload.data() + at, &value, sizeof value);
}

void splice(std::string& payload, const std::string& other, Random& random) {
  if (other.empty()) return;
  payload.resize(below(random, payload.size()) + 1);
  payload += other.substr(below(random, other.size()));
}

void repeat_range(std::string& payload, Random& random) {
  const auto [from, count] = range_of(payload, random);
  const std::string part = payload.substr(from, count);
  const std::size_t at = below(random, payload.size() + 1);
  for (std::size_t times = 1 + below(random, 3); times > 0; --times) payload.insert(at, part);
}

void change_once(std::string& payload, const std::string& other, Random& random) {
  switch (below(random, 9)) {
    case 0:
    case 1:
      return flip_bits(payload, random);
    case 2:
    case 3:
      return change_number<std::uint32_t>(payload, random);
    case 4:
      return change_number<std::uint64_t>(payload, random);
    case 5:
      return payload.resize(below(random, payload.size()) + 1);
    case 6:
      return splice(payload, other, random);
    case 7:
      return repeat_range(payload, random);
    default: {
      const auto [from, count] = range_of(payload, random);
      payload.erase(from, count);
    }
  }
}

}  // namespace

std::string mutate(const std::string& base, const std::string& other, Random& random) {
  std::string payload = base;
  for (std::size_t changes = 1 + below(random, 6); changes > 0; --changes) {
    if (payload.empty()) payload.push_back(static_cast<char>(random()));
    change_once(payload, other, random);
  }
  if (payload.size() > kPayloadBytesMax) payload.resize(kPayloadBytesMax);
  return payload;
}

}  // namespace polyhvd::fuzz
