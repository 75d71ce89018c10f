#include "control/fusion.h"

#include <algorithm>
#include <limits>

namespace polyhvd {
namespace {

struct Entry {
  CacheId id;
  const Agreement* agreement;
};

// A batch that takes more of its kind.
struct OpenBatch {
  const Agreement* like;
  std::size_t index;
  std::size_t bytes;
};

// Saturates: a nonsensical size is larger than any bound, never small.
std::size_t bytes_of(const Agreement& agreement) {
  std::size_t total = 0;
  for (std::size_t i = 0; i < agreement.shapes.size(); ++i) {
    const auto count = static_cast<std::size_t>(element_count(agreement.shapes[i]));
    std::size_t bytes = 0;
    if (__builtin_mul_overflow(count, item_size(dtype_of(agreement, i)), &bytes) ||
        __builtin_add_overflow(total, bytes, &total)) {
      return std::numeric_limits<std::size_t>::max();
    }
  }
  return total;
}

// Whether it can share a batch at all. To gather is to move bytes, of whatever type.
bool fuses(const Agreement& a) {
  return a.kind == OpKind::kAllgather || (reduces(a.kind) && a.dtypes.empty());
}

bool fusible(const Agreement& a, const Agreement& b) {
  if (a.kind != b.kind || a.process_set != b.process_set || a.device != b.device) return false;
  return !reduces(a.kind) || (a.dtype == b.dtype && a.op == b.op && a.scale == b.scale);
}

std::vector<Entry> by_priority(std::span<const CacheId> ready,
                               const std::function<const Agreement&(CacheId)>& agreement_of) {
  std::vector<Entry> entries;
  entries.reserve(ready.size());
  for (const CacheId id : ready) entries.push_back({id, &agreement_of(id)});
  const auto higher_first = [](const Entry& a, const Entry& b) {
    return a.agreement->priority > b.agreement->priority;
  };
  if (!std::is_sorted(entries.begin(), entries.end(), higher_first)) {
    std::stable_sort(entries.begin(), entries.end(), higher_first);
  }
  return entries;
}

void append_alone(std::vector<Batch>& batches, CacheId id) {
  batches.emplace_back().ids.push_back(id);
}

}  // namespace

std::vector<Batch> fuse(std::span<const CacheId> ready,
                        const std::function<const Agreement&(CacheId)>& agreement_of,
                        const FusionPolicy& policy) {
  std::vector<Batch> batches;
  if (ready.size() == 1) {
    append_alone(batches, ready.front());
    return batches;
  }
  std::vector<OpenBatch> open;
  for (const Entry& entry : by_priority(ready, agreement_of)) {
    const bool apart = policy.groups_apart && entry.agreement->shapes.size() > 1;
    if (apart || !fuses(*entry.agreement)) {
      append_alone(batches, entry.id);
      continue;
    }
    const std::size_t bytes = bytes_of(*entry.agreement);
    if (bytes > policy.bytes_max) {  // leaves the open batch open: small ones go on filling it
      append_alone(batches, entry.id);
      continue;
    }
    const auto found = std::find_if(open.begin(), open.end(), [&](const OpenBatch& candidate) {
      return fusible(*candidate.like, *entry.agreement);
    });
    if (found != open.end() && bytes <= policy.bytes_max - found->bytes) {
      batches[found->index].ids.push_back(entry.id);
      found->bytes += bytes;
      continue;
    }
    const OpenBatch fresh{entry.agreement, batches.size(), bytes};
    append_alone(batches, entry.id);
    if (found == open.end()) {
      open.push_back(fresh);
    } else {
      *found = fresh;
    }
  }
  return batches;
}

}  // namespace polyhvd
