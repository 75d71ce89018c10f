// Agreements that every rank remembers, so that a recurring operation is named
// by a number. Pure. What calls without a name agree on is kept as a template, which is
// found by its content and serves them all. Replicas on all ranks apply the same decisions in the
// same order and are therefore equal.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "control/process_set.h"
#include "control/request.h"

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
    if (asked.turn != 0) return find_template(asked, position);
    const auto named = by_name_.find(KeyView{asked.process_set, asked.name});
    if (named == by_name_.end()) return std::nullopt;
    if (!satisfies(by_id_.at(named->second), asked, position)) return std::nullopt;
    return named->second;
  }

  // The templates that differ from this one in no type, and in no shape but in rows that
  // are each rank's own; the oldest first.
  std::span<const CacheId> alike(const Agreement& agreement) const;

  // The id under which a name is known now, whatever it agrees on.
  std::optional<CacheId> id_of(ProcessSetId set, std::string_view name) const;

  // How often the operation of this name has been agreed on.
  RunCount runs_of(ProcessSetId set, std::string_view name) const;

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
  template <class Asked>
  std::optional<CacheId> find_template(const Asked& asked, int position) const;

  bool has_forgotten_ = false;  // a name, and so how often it ran
  std::unordered_map<CacheId, Agreement> by_id_;
  std::unordered_map<Key, CacheId, KeyHash, KeyEqual> by_name_;
  std::unordered_map<std::size_t, std::vector<CacheId>> templates_;  // by content_hash()
};

// Of what an agreement and all requests for it have in common. `tensor_count(asked)` and so
// on say what it is of.
template <class Asked>
std::size_t content_hash(const Asked& asked) {
  std::size_t hash = asked.process_set;
  const auto add = [&hash](std::size_t value) {
    hash = (hash ^ value) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
  };
  const std::size_t own_rows = has_own_rows(asked.kind) ? 1 : 0;
  add(static_cast<std::size_t>(asked.kind));
  for (std::size_t i = 0; i < tensor_count(asked); ++i) {
    add(static_cast<std::size_t>(dtype_of(asked, i)));
    const Shape& shape = shape_of(asked, i);
    add(shape.size());
    for (std::size_t d = own_rows; d < shape.size(); ++d) add(static_cast<std::size_t>(shape[d]));
  }
  return hash;
}

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
      agreement.device != device_kind_of(asked)) {
    return false;
  }
  // A template serves many calls, and so it has the priority that they ask for.
  const bool is_it = asked.turn == 0
                         ? agreement.name == asked.name
                         : agreement.name.empty() && agreement.priority == asked.priority;
  if (!is_it) return false;
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
      return false;  // the coordinator must receive each
  }
  return false;
}

template <class Asked>
std::optional<CacheId> ResponseCache::find_template(const Asked& asked, int position) const {
  const auto found = templates_.find(content_hash(asked));
  if (found == templates_.end()) return std::nullopt;
  for (const CacheId id : found->second) {
    if (satisfies(by_id_.at(id), asked, position)) return id;
  }
  return std::nullopt;
}

}  // namespace polyhvd
