#include "response_cache.h"

#include <algorithm>
#include <utility>

namespace polyhvd {

void ResponseCache::define(Definition definition) {
  evict(definition.id);
  // The former id of the name, if any, stays readable until it is evicted: the
  // same decision may still run it.
  by_name_.insert_or_assign(Key{definition.agreement.process_set, definition.agreement.name},
                            definition.id);
  by_id_.emplace(definition.id, std::move(definition.agreement));
}

void ResponseCache::evict(CacheId id) {
  const auto entry = by_id_.find(id);
  if (entry == by_id_.end()) return;
  const Agreement& agreement = entry->second;
  const auto named = by_name_.find(KeyView{agreement.process_set, agreement.name});
  if (named != by_name_.end() && named->second == id) by_name_.erase(named);
  by_id_.erase(entry);
}

std::optional<CacheId> ResponseCache::find(const Request& request, int position) const {
  const auto named = by_name_.find(KeyView{request.process_set, request.name});
  if (named == by_name_.end()) return std::nullopt;
  if (!satisfies(by_id_.at(named->second), request, position)) return std::nullopt;
  return named->second;
}

std::optional<CacheId> ResponseCache::id_of(ProcessSetId set, std::string_view name) const {
  const auto named = by_name_.find(KeyView{set, name});
  if (named == by_name_.end()) return std::nullopt;
  return named->second;
}

const Agreement* ResponseCache::get(CacheId id) const noexcept {
  const auto entry = by_id_.find(id);
  return entry == by_id_.end() ? nullptr : &entry->second;
}

namespace {

// All dimensions but the first are those agreed on.
bool tails_match(const Agreement& agreement, const Request& request) {
  return std::ranges::equal(agreement.shapes, request.shapes,
                            [](const Shape& agreed, const Shape& asked) {
                              return !asked.empty() && agreed.size() == asked.size() &&
                                     std::equal(asked.begin() + 1, asked.end(), agreed.begin() + 1);
                            });
}

// So are the first ones: what this position contributed when it was agreed.
bool rows_match(const Agreement& agreement, const Request& request, int position) {
  const std::size_t count = agreement.shapes.size();
  if (position < 0 || !tails_match(agreement, request)) return false;
  const std::size_t first = static_cast<std::size_t>(position) * count;
  if (first + count > agreement.rows.size()) return false;
  for (std::size_t i = 0; i < count; ++i) {
    if (request.shapes[i][0] != agreement.rows[first + i]) return false;
  }
  return true;
}

}  // namespace

bool satisfies(const Agreement& agreement, const Request& request, int position) {
  if (agreement.process_set != request.process_set || agreement.kind != request.kind ||
      agreement.dtype != request.dtype || agreement.dtypes != request.dtypes ||
      agreement.device != request.device || agreement.name != request.name) {
    return false;
  }
  switch (request.kind) {
    case OpKind::kAllreduce:
    case OpKind::kReducescatter:
      return agreement.op == request.op && agreement.scale == request.scale &&
             agreement.shapes == request.shapes;
    case OpKind::kBroadcast:
      return agreement.root == request.root && agreement.shapes == request.shapes;
    case OpKind::kAllgather:
      return rows_match(agreement, request, position);
    case OpKind::kAlltoall:
      return tails_match(agreement, request);
    case OpKind::kBarrier:
      return true;
    case OpKind::kJoin:
    case OpKind::kAddProcessSet:
    case OpKind::kRemoveProcessSet:
      return false;  // the coordinator must hear of each
  }
  return false;
}

}  // namespace polyhvd
