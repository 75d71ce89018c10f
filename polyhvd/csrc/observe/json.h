// Just enough of JSON to write the files of the timeline and the flight recorder.
#pragma once

#include <charconv>
#include <concepts>
#include <cstdint>
#include <string>
#include <string_view>

namespace polyhvd::json {

// Bytes above 127 pass as they are: text is UTF-8.
void append_string(std::string& out, std::string_view text);

template <std::integral Integer>
void append_number(std::string& out, Integer value) {
  char digits[24];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, value).ptr);
}

// "key":value, after a comma where one is due.
void append_key(std::string& out, std::string_view key);
template <std::integral Integer>
void append_field(std::string& out, std::string_view key, Integer value) {
  append_key(out, key);
  append_number(out, value);
}
void append_field(std::string& out, std::string_view key, std::string_view value);

}  // namespace polyhvd::json
