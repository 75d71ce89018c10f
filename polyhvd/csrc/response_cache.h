// Agreements that every rank remembers, so that a recurring operation is named
// by a number. Pure. Replicas on all ranks apply the same decisions in the same
// order and are therefore equal.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "process_set.h"
#include "request.h"

namespace polyhvd {

class ResponseCache {
 public:
  void define(Definition definition);  // replaces the agreement of that (set, name)
  void evict(CacheId id);              // unknown ids are ignored

  // The id whose agreement is exactly what this request asks for, if any.
  // `position` is the requesting rank's position in the process set.
  std::optional<CacheId> find(const Request& request, int position) const;

  // The id under which a name is known now, whatever it agrees on.
  std::optional<CacheId> id_of(ProcessSetId set, std::string_view name) const;

  // Null when unknown or evicted. Stable until that id is evicted or redefined.
  const Agreement* get(CacheId id) const noexcept;

  std::size_t size() const noexcept { return by_id_.size(); }

 private:
  struct Key {
    ProcessSetId set;
    std::string name;
    friend bool operator==(const Key&, const Key&) = default;
  };
  struct KeyView {
    ProcessSetId set;
    std::string_view name;
  };
  struct KeyHash {
    using is_transparent = void;
    std::size_t operator()(const Key& k) const noexcept { return hash(k.set, k.name); }
    std::size_t operator()(const KeyView& k) const noexcept { return hash(k.set, k.name); }
    static std::size_t hash(ProcessSetId set, std::string_view name) noexcept {
      return std::hash<std::string_view>{}(name) ^ (set * 0x9e3779b97f4a7c15u);
    }
  };
  struct KeyEqual {
    using is_transparent = void;
    template <class A, class B>
    bool operator()(const A& a, const B& b) const noexcept {
      return a.set == b.set && std::string_view(a.name) == std::string_view(b.name);
    }
  };
  std::unordered_map<CacheId, Agreement> by_id_;
  std::unordered_map<Key, CacheId, KeyHash, KeyEqual> by_name_;
};

// Whether an agreement is exactly what the request asks for. The one place
// that says which fields matter for which kind of operation.
bool satisfies(const Agreement& agreement, const Request& request, int position);

}  // namespace polyhvd
