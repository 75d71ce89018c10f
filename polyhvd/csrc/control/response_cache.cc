#include "control/response_cache.h"

#include <utility>

namespace polyhvd {

void ResponseCache::define(Definition definition) {
  evict(definition.id);
  if (definition.agreement.name.empty()) {
    templates_[content_hash(definition.agreement)].push_back(definition.id);
    by_id_.emplace(definition.id, std::move(definition.agreement));
    return;
  }
  // The former id of the name, if any, stays readable until it is evicted: the
  // same decision may still run it.
  const auto former = id_of(definition.agreement.process_set, definition.agreement.name);
  definition.agreement.runs = former ? by_id_.at(*former).runs : RunCount{0, !has_forgotten_};
  by_name_.insert_or_assign(Key{definition.agreement.process_set, definition.agreement.name},
                            definition.id);
  by_id_.emplace(definition.id, std::move(definition.agreement));
}

void ResponseCache::evict(CacheId id) {
  const auto entry = by_id_.find(id);
  if (entry == by_id_.end()) return;
  const Agreement& agreement = entry->second;
  if (agreement.name.empty()) {
    const auto among = templates_.find(content_hash(agreement));
    std::erase(among->second, id);
    if (among->second.empty()) templates_.erase(among);
    by_id_.erase(entry);
    return;
  }
  const auto named = by_name_.find(KeyView{agreement.process_set, agreement.name});
  if (named != by_name_.end() && named->second == id) {
    by_name_.erase(named);
    if (!changes_membership(agreement.kind)) has_forgotten_ = true;
  }
  by_id_.erase(entry);
}

std::span<const CacheId> ResponseCache::alike(const Agreement& agreement) const {
  const auto found = templates_.find(content_hash(agreement));
  if (found == templates_.end()) return {};
  return found->second;
}

std::optional<CacheId> ResponseCache::id_of(ProcessSetId set, std::string_view name) const {
  const auto named = by_name_.find(KeyView{set, name});
  if (named == by_name_.end()) return std::nullopt;
  return named->second;
}

RunCount ResponseCache::runs_of(ProcessSetId set, std::string_view name) const {
  const auto id = id_of(set, name);
  return id ? by_id_.at(*id).runs : RunCount{0, !has_forgotten_};
}

const Agreement* ResponseCache::get(CacheId id) const noexcept {
  const auto entry = by_id_.find(id);
  return entry == by_id_.end() ? nullptr : &entry->second;
}

}  // namespace polyhvd
