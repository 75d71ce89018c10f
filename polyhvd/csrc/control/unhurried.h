// Operations that need not ever run: a rank submits one and goes on, and others may never
// do so. No rank waits for them, so they are neither stalls nor waits for others.
#pragma once

#include <string_view>

namespace polyhvd {

// The names are given by polyhvd/data/agreement.py.
inline bool is_unhurried(std::string_view name) noexcept {
  return name.starts_with("polyhvd.data/");
}

}  // namespace polyhvd
