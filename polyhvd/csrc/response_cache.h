// Agreements that every rank remembers, so that a recurring operation is named
// by a number. Pure. Replicas on all ranks apply the same decisions in the same
// order and are therefore equal.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "process_set.h"
#include "request.h"

namespace polyhvd {

// Whether an agreement is exactly what the request asks for. The one place that says
// which fields matter for which kind of operation. `Asked`: a Request, or a Submission
// that none need be made of.
template <class Asked>
bool satisfies(const Agreement& agreement, const Asked& asked, int position);

class ResponseCache {
 public:
  void define(Definition definition);  // replaces the agreement of that (set, name)
  void evict(CacheId id);              // unknown ids are ignored

  // The id whose agreement is exactly what this request asks for, if any.
  // `position` is the requesting rank's position in the process set.
  template <class Asked>
  std::optional<CacheId> find(const Asked& asked, int position) const {
    const auto named = by_name_.find(KeyView{asked.process_set, asked.name});
    if (named == by_name_.end()) return std::nullopt;
    if (!satisfies(by_id_.at(named->second), asked, position)) return std::nullopt;
    return named->second;
  }

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

// Whether `alike(agreed, asked, i)` holds for the shapes of all tensors, which are as many.
template <class Asked, class Alike>
bool shapes_match(const Agreement& agreement, const Asked& asked, Alike&& alike) {
  if (agreement.shapes.size() != tensor_count(asked)) return false;
  for (std::size_t i = 0; i < agreement.shapes.size(); ++i) {
    if (!alike(agreement.shapes[i], shape_of(asked, i), i)) return false;
  }
  return true;
}

// All dimensions but the first.
inline bool tails_match(const Shape& agreed, const Shape& asked) {
  return !asked.empty() && agreed.size() == asked.size() &&
         std::equal(asked.begin() + 1, asked.end(), agreed.begin() + 1);
}

// The rows, too: those that this position contributed when it was agreed.
template <class Asked>
bool rows_match(const Agreement& agreement, const Asked& asked, int position) {
  const std::size_t count = agreement.shapes.size();
  const std::size_t first = static_cast<std::size_t>(position) * count;
  if (position < 0 || first + count > agreement.rows.size()) return false;
  return shapes_match(agreement, asked, [&](const Shape& agreed, const Shape& wanted, auto i) {
    return tails_match(agreed, wanted) && wanted[0] == agreement.rows[first + i];
  });
}

template <class Asked>
bool satisfies(const Agreement& agreement, const Asked& asked, int position) {
  if (agreement.process_set != asked.process_set || agreement.kind != asked.kind ||
      agreement.device != device_kind_of(asked) || agreement.name != asked.name) {
    return false;
  }
  for (std::size_t i = 0; i < std::min(agreement.shapes.size(), tensor_count(asked)); ++i) {
    if (dtype_of(agreement, i) != dtype_of(asked, i)) return false;
  }
  const auto same = [](const Shape& agreed, const Shape& wanted, auto) { return agreed == wanted; };
  switch (asked.kind) {
    case OpKind::kAllreduce:
    case OpKind::kReducescatter:
      return agreement.op == asked.op && agreement.scale == asked.scale &&
             shapes_match(agreement, asked, same);
    case OpKind::kBroadcast:
      return agreement.root == asked.root && shapes_match(agreement, asked, same);
    case OpKind::kAllgather:
      return rows_match(agreement, asked, position);
    case OpKind::kAlltoall:
      return shapes_match(agreement, asked, [](const Shape& agreed, const Shape& wanted, auto) {
        return tails_match(agreed, wanted);
      });
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
