// Where in a Python program a call was made.
#pragma once

#include <string>

namespace polyhvd {

// "train.py:88": the innermost frame outside polyhvd. Only for operations that
// are new to the response cache, so it may take a microsecond. Needs Python's lock.
std::string caller_line();

}  // namespace polyhvd
