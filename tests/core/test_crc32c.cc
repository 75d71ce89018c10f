#include <doctest/doctest.h>

#include <random>
#include <span>
#include <string>
#include <string_view>

#include "control/crc32c.h"

namespace polyhvd {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

std::string random_text(std::size_t length) {
  std::mt19937 random(3);
  std::string text(length, 0);
  for (char& byte : text) byte = static_cast<char>(random());
  return text;
}

TEST_CASE("crc32c gives the published values") {
  std::string zeros(32, '\0'), ones(32, '\xff'), ascending;
  for (char i = 0; i < 32; ++i) ascending.push_back(i);
  for (const auto crc : {crc32c, crc32c_portable}) {
    CHECK(crc(bytes_of("123456789"), 0) == 0xe3069283u);
    CHECK(crc(bytes_of(""), 0) == 0u);
    CHECK(crc(bytes_of(zeros), 0) == 0x8a9136aau);  // RFC 3720, B.4
    CHECK(crc(bytes_of(ones), 0) == 0x62a8ab43u);
    CHECK(crc(bytes_of(ascending), 0) == 0x46dd794eu);
  }
}

TEST_CASE("crc32c by instruction and by table agree at every length and alignment") {
  const std::string text = random_text(300);
  for (std::size_t from = 0; from < 9; ++from) {
    for (std::size_t length = 0; from + length <= text.size(); ++length) {
      const auto bytes = bytes_of(std::string_view(text).substr(from, length));
      REQUIRE(crc32c(bytes) == crc32c_portable(bytes));
    }
  }
}

TEST_CASE("crc32c of a stream does not depend on the pieces that it comes in") {
  const std::string text = random_text(300);
  const auto bytes = bytes_of(text);
  for (std::size_t cut = 0; cut <= text.size(); ++cut) {
    REQUIRE(crc32c(bytes.subspan(cut), crc32c(bytes.first(cut))) == crc32c(bytes));
    REQUIRE(crc32c_portable(bytes.subspan(cut), crc32c_portable(bytes.first(cut))) ==
            crc32c_portable(bytes));
  }
}

}  // namespace
}  // namespace polyhvd
