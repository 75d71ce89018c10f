#include <doctest/doctest.h>

#include <string>
#include <vector>

#include "control/mac.h"

namespace polyhvd {
namespace {

Key ascending_key() {
  Key key;
  for (std::size_t i = 0; i < key.size(); ++i) key[i] = static_cast<std::byte>(i);
  return key;
}

std::vector<std::byte> message_of(std::size_t length) {
  std::vector<std::byte> message(length);
  for (std::size_t i = 0; i < length; ++i) message[i] = static_cast<std::byte>(i * 7 % 251);
  return message;
}

std::string hex(const Tag& tag) {
  std::string text;
  for (const std::byte byte : tag) {
    for (const auto half : {byte >> 4, byte & std::byte{15}}) {
      text += "0123456789abcdef"[std::to_integer<int>(half)];
    }
  }
  return text;
}

// Whatever else Python's hashlib says of other keys and lengths: test_macs.py.
TEST_CASE("a tag is what hashlib.blake2b makes of the key, around the ends of blocks") {
  const Mac mac(ascending_key());
  const std::pair<std::size_t, const char*> tags[] = {
      {1, "cb0f7736a53974236661585b8842dd8c"},   {12, "f9880a7752fb11de4f86eaf1c6e07c82"},
      {127, "b5f452aec5ef7dc86b6949e118c0fbc1"}, {128, "0923c41401bc0230b4a332e62269341f"},
      {129, "58944213038727e19f7d8b5c4b30ffc3"}, {255, "0a8b3782f5fd90079409d666eb784eda"},
      {256, "e04e99be170dda974cdaebae2bf21317"}, {257, "d6e4019058be2532f833b58d8f520f0c"},
      {1000, "82720cd8075fd707e41a58b4dde16177"}};
  for (const auto& [length, expected] : tags) {
    CAPTURE(length);
    CHECK(hex(mac.of(message_of(length))) == expected);
  }
}

TEST_CASE("a tag does not depend on where head and body meet") {
  const Mac mac(ascending_key());
  const auto message = message_of(300);
  const std::span<const std::byte> whole(message);
  const Tag tag = mac.of(whole);
  for (std::size_t cut = 0; cut <= message.size(); ++cut) {
    CAPTURE(cut);
    REQUIRE(mac.of(whole.first(cut), whole.subspan(cut)) == tag);
  }
}

TEST_CASE("tags that differ in any bit are not the same") {
  const Tag tag = Mac(ascending_key()).of(message_of(5));
  CHECK(is_same(tag, tag));
  for (std::size_t bit = 0; bit < 8 * kTagBytes; ++bit) {
    Tag other = tag;
    other[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    CHECK_FALSE(is_same(tag, other));
  }
}

}  // namespace
}  // namespace polyhvd
