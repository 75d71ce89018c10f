// Where in a Python program a call was made.
#pragma once

#include <string>

namespace polyhvd {

// "train.py:88": the innermost frame outside polyhvd and the frameworks; if there is
// none, as in a thread of a framework, the innermost one outside polyhvd. Only for
// operations that are new to the response cache, so it may take some microseconds.
// Needs Python's lock.
std::string caller_line();

}  // namespace polyhvd
