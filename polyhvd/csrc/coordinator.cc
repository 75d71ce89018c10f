#include "coordinator.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "disagreement.h"

namespace polyhvd {

namespace {

// ---- what ranks agree on --------------------------------------------------------

// Fills in rows and the first dimensions of what an allgather yields. False when
// there is no such result: a scalar, or more rows than can be counted.
bool add_up_rows(Agreement& agreement, std::span<const Request> requests) {
  for (Shape& shape : agreement.shapes) {
    if (shape.empty()) return false;
    shape[0] = 0;
  }
  agreement.rows.reserve(requests.size() * agreement.shapes.size());
  for (const Request& request : requests) {
    for (std::size_t i = 0; i < request.shapes.size(); ++i) {
      const std::int64_t rows = request.shapes[i][0];
      std::int64_t& sum = agreement.shapes[i][0];
      if (__builtin_add_overflow(sum, rows, &sum)) return false;
      agreement.rows.push_back(rows);
    }
  }
  return true;
}

// The first member's fields stand for all.
Agreement agreement_of(std::span<const Request> requests) {
  const Request& first = requests.front();
  Agreement agreement;
  agreement.process_set = first.process_set;
  agreement.kind = first.kind;
  agreement.op = first.op;
  agreement.dtype = first.dtype;
  agreement.device = first.device;
  agreement.root = first.root;
  agreement.priority = first.priority;
  agreement.scale = first.scale;
  agreement.shapes = first.shapes;
  agreement.name = first.name;
  return agreement;
}

std::vector<std::string> places_of(const std::vector<Request>& requests) {
  const bool all_equal = std::all_of(requests.begin(), requests.end(), [&](const Request& other) {
    return other.where == requests.front().where;
  });
  if (all_equal) return {requests.front().where};
  std::vector<std::string> places;
  places.reserve(requests.size());
  for (const Request& request : requests) places.push_back(request.where);
  return places;
}

[[noreturn]] void fail_protocol(std::initializer_list<std::string_view> what) {
  throw Failure(ErrorCode::kInternal, concat({"coordinator: ", concat(what)}));
}

[[noreturn]] void fail_duplicate(int rank, std::string_view name) {
  fail_protocol({"rank ", std::to_string(rank), " reported '", name, "' again before it ran"});
}

[[noreturn]] void fail_not_member(CacheId id) {
  fail_protocol({"a hit for id ", std::to_string(id), " from outside its process set"});
}

}  // namespace

// ---- reports --------------------------------------------------------------------

Coordinator::Coordinator(const ProcessSets& sets, CoordinatorOptions options)
    : sets_(sets), options_(options) {}

void Coordinator::add(const Report& report, std::span<const int> from_subtree, Time now) {
  for (const CacheId id : report.subtree_hits) add_subtree_hit(id, from_subtree, now);
  for (const Report::Hit& hit : report.hits) add_hit(hit.rank, hit.id, now);
  for (const Request& request : report.requests) add_request(request, now);
  for (const int rank : report.departures) add_departure(rank);
}

void Coordinator::add_subtree_hit(CacheId id, std::span<const int> from_subtree, Time now) {
  Known* known = find_known(id);
  if (known == nullptr) {
    // The set went with the id: whoever has nothing outstanding for it ignores this.
    for (const int rank : from_subtree) next_.resends.push_back({rank, id});
    return;
  }
  bool any = false;
  for (const int rank : from_subtree) {
    const auto position = position_in(known->members, rank);
    if (!position) continue;
    any = true;
    const bool may_replace_id = known->negotiation != nullptr;
    add_side(id, *known, *position, now);
    if (!may_replace_id) continue;
    known = find_known(id);
    if (known == nullptr) return;  // that was the last side, and the id was replaced
  }
  if (!any) fail_not_member(id);
}

void Coordinator::add_hit(int rank, CacheId id, Time now) {
  Known* known = find_known(id);
  if (known == nullptr) {
    next_.resends.push_back({rank, id});
    return;
  }
  const auto position = position_in(known->members, rank);
  if (!position) fail_not_member(id);
  add_side(id, *known, *position, now);
}

void Coordinator::add_side(CacheId id, Known& known, int position, Time now) {
  if (known.negotiation != nullptr) {
    add_request(request_of(known, position), now);
    return;
  }
  const Agreement& agreement = *known.agreement;
  if (is_doomed(agreement.process_set)) {
    refuse_departed(agreement.process_set, agreement.kind, agreement.name);
    return;
  }
  const auto index = static_cast<std::size_t>(position);
  if (known.ready_in == decision_number_ || !known.ready.insert(index)) {
    fail_duplicate(known.members[index], agreement.name);
  }
  if (known.ready.count() == known.members.size()) {
    known.ready.clear();
    mark_ready(id, known);
  } else if (known.ready.count() == 1) {
    known.since = now;
  }
}

void Coordinator::add_request(Request request, Time now) {
  const auto position = sets_.position(request.process_set, request.rank);
  if (!position) {
    fail_protocol({"rank ", std::to_string(request.rank), " asked for '", request.name,
                   "' in process set ", std::to_string(request.process_set),
                   ", which it is not in"});
  }
  if (is_doomed(request.process_set)) {
    refuse_departed(request.process_set, request.kind, request.name);
    return;
  }
  const Key key{request.process_set, request.name};
  Negotiation& negotiation = negotiation_of(key, now);
  const auto index = static_cast<std::size_t>(*position);
  if (!negotiation.present.insert(index)) fail_duplicate(request.rank, request.name);
  negotiation.requests[index] = std::move(request);
  if (negotiation.present.count() == negotiation.requests.size()) complete(key);
}

void Coordinator::add_departure(int rank) {
  if (rank < 0 || rank >= sets_.world_size()) {
    fail_protocol({"departure of rank ", std::to_string(rank), ", which is not in the world"});
  }
  if (!departed_.insert(rank).second) return;
  for (auto at = pending_.begin(); at != pending_.end();) {
    const auto& [key, negotiation] = *at;
    if (!sets_.position(key.first, rank)) {
      ++at;
      continue;
    }
    std::size_t any = 0;
    while (!negotiation.present.contains(any)) ++any;
    refuse_departed(key.first, negotiation.requests[any].kind, key.second);
    if (negotiation.cached != 0) known_.at(negotiation.cached).negotiation = nullptr;
    at = pending_.erase(at);
  }
  for (const CacheId id : by_age_) {
    Known& known = known_.at(id);
    if (!position_in(known.members, rank)) continue;
    // Agreed but not announced counts as pending: the rank may be gone by then.
    if (known.ready_in == decision_number_) {
      std::erase(ready_, id);
      known.ready_in = 0;
    } else if (known.ready.empty()) {
      continue;
    }
    known.ready.clear();
    const Agreement& agreement = *known.agreement;
    refuse_departed(agreement.process_set, agreement.kind, agreement.name);
  }
}

// ---- agreeing by name -------------------------------------------------------------

Coordinator::Known* Coordinator::find_known(CacheId id) noexcept {
  const auto found = known_.find(id);
  return found == known_.end() ? nullptr : &found->second;
}

Coordinator::Negotiation& Coordinator::negotiation_of(const Key& key, Time now) {
  const auto [entry, fresh] = pending_.try_emplace(key);
  Negotiation& negotiation = entry->second;
  if (!fresh) return negotiation;
  const std::size_t size = sets_.members(key.first).size();
  negotiation.present = MemberMask(size);
  negotiation.requests.resize(size);
  negotiation.since = now;
  if (const auto id = cache_.id_of(key.first, key.second)) withdraw(*id, negotiation);
  return negotiation;
}

void Coordinator::withdraw(CacheId id, Negotiation& negotiation) {
  Known& known = known_.at(id);
  if (known.ready_in == decision_number_) {
    fail_protocol({"'", known.agreement->name, "' was asked for again before it ran"});
  }
  if (!known.ready.empty()) negotiation.since = known.since;
  for (std::size_t i = 0; i < known.members.size(); ++i) {
    if (!known.ready.contains(i)) continue;
    negotiation.present.insert(i);
    negotiation.requests[i] = request_of(known, static_cast<int>(i));
  }
  known.ready.clear();
  known.negotiation = &negotiation;
  negotiation.cached = id;
}

Request Coordinator::request_of(const Known& known, int position) const {
  const Agreement& agreement = *known.agreement;
  const auto index = static_cast<std::size_t>(position);
  Request request;
  request.rank = known.members[index];
  request.process_set = agreement.process_set;
  request.kind = agreement.kind;
  request.op = agreement.op;
  request.dtype = agreement.dtype;
  request.device = agreement.device;
  request.root = agreement.root;
  request.priority = agreement.priority;
  request.scale = agreement.scale;
  request.shapes = agreement.shapes;
  if (agreement.kind == OpKind::kAllgather) {
    const std::size_t count = request.shapes.size();
    for (std::size_t i = 0; i < count; ++i) {
      request.shapes[i][0] = agreement.rows[index * count + i];
    }
  }
  request.name = agreement.name;
  request.where = known.where.size() == 1 ? known.where.front() : known.where[index];
  return request;
}

void Coordinator::complete(const Key& key) {
  auto node = pending_.extract(key);
  const Negotiation& negotiation = node.mapped();
  if (negotiation.cached != 0) known_.at(negotiation.cached).negotiation = nullptr;
  conclude(negotiation.requests);
}

void Coordinator::conclude(const std::vector<Request>& requests) {
  const Request& first = requests.front();
  if (auto error = disagreement(requests)) {
    next_.refusals.push_back({first.process_set, first.name, std::move(*error)});
    return;
  }
  Agreement agreement = agreement_of(requests);
  if (first.kind == OpKind::kAllgather && !add_up_rows(agreement, requests)) {
    next_.refusals.push_back(
        {first.process_set,
         first.name,
         {ErrorCode::kInvalidArgument,
          concat({subject(first.kind, first.name),
                  ": a tensor without a first dimension, or too many rows; reshape it before "
                  "gathering."})}});
    return;
  }
  if (const auto id = cache_.id_of(first.process_set, first.name)) {
    Known& known = known_.at(*id);
    agreement.priority = known.agreement->priority;
    if (agreement == *known.agreement) {
      known.where = places_of(requests);
      mark_ready(*id, known);
      return;
    }
    agreement.priority = first.priority;
  }
  const CacheId id = define(std::move(agreement), places_of(requests));
  mark_ready(id, known_.at(id));
}

// ---- ids --------------------------------------------------------------------------

CacheId Coordinator::define(Agreement agreement, std::vector<std::string> where) {
  if (const auto old = cache_.id_of(agreement.process_set, agreement.name)) forget(*old);
  CacheId id = next_id_++;
  while (id == 0 || known_.contains(id)) id = next_id_++;  // after four billion
  next_.definitions.push_back({id, agreement});
  cache_.define({id, std::move(agreement)});
  Known& known = known_[id];
  known.agreement = cache_.get(id);
  known.members = sets_.members(known.agreement->process_set);
  known.ready = MemberMask(known.members.size());
  known.where = std::move(where);
  known.age = by_age_.insert(by_age_.end(), id);
  return id;
}

void Coordinator::mark_ready(CacheId id, Known& known) {
  known.ready_in = decision_number_;
  by_age_.splice(by_age_.end(), by_age_, known.age);
  ready_.push_back(id);
}

// The agreement itself stays in cache_ until the decision is taken, which may
// still run it.
void Coordinator::forget(CacheId id) {
  const auto found = known_.find(id);
  by_age_.erase(found->second.age);
  known_.erase(found);
  next_.evictions.push_back(id);
}

// Evicts the least recently used ids that nobody waits for. Ids that run in this
// very decision go last; they are at the end of by_age_.
void Coordinator::shrink_cache() {
  const auto is_idle = [](const Known& known) {
    return known.ready.empty() && known.negotiation == nullptr;
  };
  for (auto at = by_age_.begin(); at != by_age_.end() && known_.size() > options_.cache_capacity;) {
    const CacheId id = *at++;
    if (is_idle(known_.at(id))) forget(id);
  }
}

// ---- decisions --------------------------------------------------------------------

bool Coordinator::has_decision() const noexcept { return !ready_.empty() || !next_.empty(); }

Decision Coordinator::take_decision() {
  if (!ready_.empty()) {
    const auto agreement_of_id = [this](CacheId id) -> const Agreement& {
      return *known_.at(id).agreement;
    };
    next_.batches = fuse(ready_, agreement_of_id, options_.fusion);
    ready_.clear();
  }
  if (known_.size() > options_.cache_capacity) shrink_cache();
  for (const CacheId id : next_.evictions) cache_.evict(id);
  ++decision_number_;
  return std::exchange(next_, {});
}

bool Coordinator::is_doomed(ProcessSetId set) const {
  return std::any_of(departed_.begin(), departed_.end(),
                     [&](int rank) { return sets_.position(set, rank).has_value(); });
}

void Coordinator::refuse_departed(ProcessSetId set, OpKind kind, const std::string& name) {
  std::vector<int> gone;
  for (const int rank : departed_) {
    if (sets_.position(set, rank)) gone.push_back(rank);
  }
  next_.refusals.push_back(
      {set,
       name,
       {ErrorCode::kPeerDeparted,
        concat({subject(kind, name), " needs ", text_of_ranks(gone),
                gone.size() == 1 ? ", which has" : ", which have", " shut down"})}});
}

std::vector<Stalled> Coordinator::stalled(Time now, std::chrono::duration<double> at_least) const {
  std::vector<Stalled> found;
  const auto add_if_old = [&](ProcessSetId set, const std::string& name, Time since,
                              const MemberMask& ready) {
    const std::chrono::duration<double> age = now - since;
    if (ready.empty() || age < at_least) return;
    Stalled& stalled = found.emplace_back(Stalled{set, name, age, {}, {}});
    const std::span<const int> members = sets_.members(set);
    for (std::size_t i = 0; i < members.size(); ++i) {
      (ready.contains(i) ? stalled.ready_ranks : stalled.absent_ranks).push_back(members[i]);
    }
  };
  for (const auto& [key, negotiation] : pending_) {
    add_if_old(key.first, key.second, negotiation.since, negotiation.present);
  }
  for (const auto& [id, known] : known_) {
    add_if_old(known.agreement->process_set, known.agreement->name, known.since, known.ready);
  }
  std::sort(found.begin(), found.end(), [](const Stalled& a, const Stalled& b) {
    if (a.age != b.age) return a.age > b.age;
    return std::tie(a.process_set, a.name) < std::tie(b.process_set, b.name);
  });
  return found;
}

}  // namespace polyhvd
