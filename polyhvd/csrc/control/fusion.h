// Decides which agreed operations run as one. Pure; the same input gives the
// same batches on every machine.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "control/request.h"

namespace polyhvd {

struct FusionPolicy {
  std::size_t bytes_max = 128u << 20;
  bool groups_apart = false;  // a request of several tensors is a separate batch
};

// Orders `ready` by priority (higher first, else as given) and packs allreduces, and
// reducescatters, of the same (process set, dtype, op, scale, device) into batches of at most
// bytes_max, looking past those of other kinds: float16 between float32 does
// not break a batch. Allgathers of the same (process set, device) are packed whatever their
// dtypes; what counts are the bytes of all members. A batch stands where its first member stood.
// A request larger than bytes_max, or a reduction of several dtypes, is a separate batch.
std::vector<Batch> fuse(std::span<const CacheId> ready,
                        const std::function<const Agreement&(CacheId)>& agreement_of,
                        const FusionPolicy& policy);

}  // namespace polyhvd
