#include "observe/json.h"

namespace polyhvd::json {

void append_string(std::string& out, std::string_view text) {
  constexpr std::string_view kHex = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out.append(1, '\\').append(1, c);
    } else if (byte < 0x20) {
      out.append("\\u00").append(1, kHex[byte >> 4]).append(1, kHex[byte & 15]);
    } else {
      out += c;
    }
  }
  out += '"';
}

void append_key(std::string& out, std::string_view key) {
  if (!out.ends_with('{')) out += ',';
  out.append(1, '"').append(key).append("\":");
}

void append_field(std::string& out, std::string_view key, std::string_view value) {
  append_key(out, key);
  append_string(out, value);
}

}  // namespace polyhvd::json
