// Says whether the ranks' requests can run as one, and if not, what each rank
// asked for. Pure text and comparison; the coordinator decides what follows.
#pragma once

#include <initializer_list>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "control/error.h"
#include "control/request.h"

namespace polyhvd {

// Nothing when the requests, one per member and in their order, can run as one.
std::optional<Error> disagreement(std::span<const Request> requests);

// Pieces of messages. Only by appending: GCC 12 warns wrongly of operator+ on
// literals (PR 105651).
std::string concat(std::initializer_list<std::string_view> parts);

// "allreduce 'x'".
std::string subject(OpKind kind, std::string_view name);

// "rank 3" or "ranks 0-2, 7"; `ranks` are sorted.
std::string text_of_ranks(std::span<const int> ranks);

// A message for a terminal, which must not interpret what is in names: control characters but line
// ends and tabs as "\x1b".
std::string without_controls(std::string_view text);

}  // namespace polyhvd
