// What a rank that has joined contributes to the operations of the others: neutral
// elements, no rows; what comes out is dropped.
#pragma once

#include <cstddef>
#include <span>

#include "control/operation.h"
#include "control/request.h"

namespace polyhvd {

// An operation with its own memory, to be run in the place of one that the member
// at `position` has not asked for.
OperationPtr stand_in(const Agreement& agreement, int position);

// Fills `count` elements with the value that does not change a reduction: for sums
// -0.0, which unlike 0.0 changes no zero's sign.
void fill_neutral(DType dtype, ReduceOp op, const Scale& scale, std::byte* data, std::size_t count);

}  // namespace polyhvd
