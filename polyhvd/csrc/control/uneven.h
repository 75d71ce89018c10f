// Words for what mostly goes wrong with data: ranks that do not make the same calls. Pure text.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "control/request.h"
#include "control/stall_inspector.h"

namespace polyhvd {

// "121st".
std::string ordinal(std::uint64_t number);

// Why an operation that `waiting` ask for cannot run: " it finished after its 120th allreduce of
// 'x', while rank 1 is at its 121st: give every rank the same number of batches, ...". `runs` is
// how often the operation has been agreed on before; nothing where that is unknown. `pronoun`
// stands for the ranks that have left: "it" or "they".
std::string text_of_uneven(OpKind kind, std::string_view name, const RunCount& runs,
                           std::string_view pronoun, std::span<const int> waiting);

// "allreduce 'x' needs rank 1, which has shut down: it finished ...".
std::string text_of_departed(OpKind kind, std::string_view name, const RunCount& runs,
                             std::span<const int> gone, std::span<const int> waiting);

// "rank 1 has failed: ValueError: bad row (train.py, line 31)".
std::string text_of_failed(const Departure& departure);

// Lines about the likely cause where ranks wait for each other, each in another operation; empty
// where none do.
std::string text_of_order(std::span<const Stalled> stalled);

}  // namespace polyhvd
