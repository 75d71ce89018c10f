// One reduction as all ways of doing it take it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>

#include "engine/backend.h"
#include "host/cursor.h"

namespace polyhvd::host {

struct Reduction {
  Segments in;
  Segments out;
  DType dtype;
  ReduceOp op;
  Scale scale;
  Deadline deadline;
  std::size_t bytes;

  // Whether results are written past the caches: they are large, and no tensor is reduced where
  // it lies.
  bool passes_caches() const {
    return bytes >= kOutputsPastCachesMin &&
           std::ranges::equal(in, out, std::ranges::not_equal_to{}, &Segment::data, &Segment::data);
  }
};

}  // namespace polyhvd::host
