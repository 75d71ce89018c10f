#include "control/coordinator.h"

#include <algorithm>
#include <initializer_list>
#include <string_view>

#include "control/disagreement.h"

namespace polyhvd {

namespace {

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

void Coordinator::add(const Report& report, const Subtree& from, Time now) {
  for (const CacheId id : report.subtree_hits) add_subtree_hit(id, from, now);
  for (const Report::Hit& hit : report.hits) add_hit(hit.rank, hit.id, now);
  for (const Report::TurnHit& hit : report.subtree_turns) add_subtree_turn(hit, from, now);
  for (const Report::TurnHit& hit : report.turns) add_turn(hit, now);
  for (const Request& request : report.subtree_requests) add_subtree_request(request, from, now);
  for (const Request& request : report.requests) add_request(request, now);
  for (const Departure& departure : report.departures) add_departure(departure);
  for (const Resend& answer : report.answers) add_answer(answer.rank);
}

void Coordinator::add_subtree_hit(CacheId id, const Subtree& from, Time now) {
  Known* known = find_known(id);
  if (known == nullptr) {
    // The set went with the id: whoever has nothing outstanding for it ignores this.
    for (const int rank : from.ranks()) ask_again(rank, id);
    return;
  }
  const MemberMask& sides = from.members(known->agreement->process_set);
  if (sides.empty()) fail_not_member(id);
  if (add_sides(id, *known, sides, now)) return;
  for (std::size_t i = 0; i < known->members.size(); ++i) {
    if (!sides.contains(i)) continue;
    add_side(id, *known, static_cast<int>(i), now);
    known = find_known(id);
    if (known == nullptr) return;  // that was the last side, and the id was replaced
  }
}

bool Coordinator::add_sides(CacheId id, Known& known, const MemberMask& sides, Time now) {
  if (known.negotiation != nullptr || !joined_.empty() || !departed_.empty()) return false;
  if (known.ready_in == decision_number_) return false;
  const bool is_first = known.ready.empty();
  if (!known.ready.merge(sides)) return false;
  if (known.ready.count() == known.members.size()) {
    known.ready.clear();
    mark_ready(id, known);
  } else if (is_first) {
    known.since = now;
  }
  return true;
}

void Coordinator::add_hit(int rank, CacheId id, Time now) {
  Known* known = find_known(id);
  if (known == nullptr) {
    ask_again(rank, id);
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
    refuse_departed({agreement.process_set, agreement.kind, 0}, agreement.name,
                    {known.members[static_cast<std::size_t>(position)]});
    return;
  }
  const auto index = static_cast<std::size_t>(position);
  if (known.ready_in == decision_number_ || !known.ready.insert(index)) {
    fail_duplicate(known.members[index], agreement.name);
  }
  if (known.ready.count() == known.members.size()) {
    known.ready.clear();
    mark_ready(id, known);
    return;
  }
  if (known.ready.count() == 1) known.since = now;
  if (!joined_.empty() && is_complete(known.ready, known.members)) {
    const Key key{agreement.process_set, agreement.name};
    negotiation_of(key, now);
    complete(key);
  }
}

void Coordinator::add_request(Request request, Time now) {
  if (refuse_if_doomed(request)) return;
  const auto position = sets_.position(request.process_set, request.rank);
  if (!position) {
    fail_protocol({"rank ", std::to_string(request.rank), " requested '", request.name,
                   "' in process set ", std::to_string(request.process_set),
                   ", which it is not in"});
  }
  const Key key{request.process_set, request.name};
  const int rank = request.rank;
  const bool joins = request.kind == OpKind::kJoin;
  Negotiation& negotiation = negotiation_of(key, now);
  if (request.turn != 0) {
    const auto round = rounds_.find({request.process_set, request.kind, request.turn});
    if (round != rounds_.end()) withdraw(round, negotiation);
  }
  if (!negotiation.add(std::move(request), static_cast<std::size_t>(*position))) {
    fail_duplicate(rank, key.second);
  }
  if (joins) {
    add_join(rank);
  } else if (is_complete(negotiation.present, negotiation.members)) {
    complete(key);
  }
}

void Coordinator::add_subtree_request(const Request& request, const Subtree& from, Time now) {
  if (refuse_if_doomed(request)) return;
  if (request.turn != 0) {
    fail_protocol({"'", request.name, "' was requested by several ranks at once"});
  }
  if (!sets_.contains(request.process_set) || from.members(request.process_set).empty()) {
    fail_protocol({"'", request.name, "' was requested in process set ",
                   std::to_string(request.process_set), " by ranks that are not in it"});
  }
  const Key key{request.process_set, request.name};
  Negotiation& negotiation = negotiation_of(key, now);
  if (!negotiation.add(request, from.members(request.process_set))) {
    fail_duplicate(request.rank, request.name);
  }
  if (is_complete(negotiation.present, negotiation.members)) complete(key);
}

// The join itself is complete when all ranks have joined, and runs last.
void Coordinator::add_join(int rank) {
  joined_.insert(rank);
  last_joined_ = rank;
  complete_without_joined();
}

void Coordinator::complete_without_joined() {
  std::vector<Key> complete_keys;
  for (const auto& [key, negotiation] : pending_) {
    if (negotiation.is_join() && !resends_.empty()) continue;
    if (is_complete(negotiation.present, negotiation.members)) complete_keys.push_back(key);
  }
  for (const CacheId id : by_age_) {
    const Known& known = known_.at(id);
    if (known.ready.empty() || !is_complete(known.ready, known.members)) continue;
    complete_keys.emplace_back(known.agreement->process_set, known.agreement->name);
  }
  const auto is_other = [this](const Key& key) {
    const auto found = pending_.find(key);
    return found == pending_.end() || !found->second.is_join();
  };
  for (Key& key : complete_rounds(Time{})) complete_keys.push_back(std::move(key));
  std::ranges::stable_partition(complete_keys, is_other);
  for (const Key& key : complete_keys) {
    negotiation_of(key, Time{});
    complete(key);
  }
}

bool Coordinator::is_complete(const MemberMask& present, std::span<const int> members) const {
  if (present.count() == members.size()) return true;
  if (joined_.empty()) return false;
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (present.contains(i)) continue;
    if (!joined_.contains(members[i]) || resends_.contains(members[i])) return false;
  }
  return true;
}

void Coordinator::ask_again(int rank, CacheId id, Turn turn) {
  next_.resends.push_back({rank, id, turn});
  ++resends_[rank];
}

void Coordinator::add_answer(int rank) {
  const auto found = resends_.find(rank);
  if (found == resends_.end()) {
    fail_protocol({"rank ", std::to_string(rank), " answered a question that it was not asked"});
  }
  if (--found->second > 0) return;
  resends_.erase(found);
  if (joined_.contains(rank)) complete_without_joined();
}

void Coordinator::add_departure(const Departure& departure) {
  const int rank = departure.rank;
  if (rank < 0 || rank >= sets_.world_size()) {
    fail_protocol({"departure of rank ", std::to_string(rank), ", which is not in the world"});
  }
  if (!departed_.insert(rank).second) return;
  if (!departure.words.empty()) failed_.push_back(departure);
  for (auto at = pending_.begin(); at != pending_.end();) {
    const auto& [key, negotiation] = *at;
    if (!sets_.position(key.first, rank)) {
      ++at;
      continue;
    }
    refuse_departed({key.first, negotiation.first.kind, negotiation.first.turn}, key.second,
                    ranks_of(negotiation.present, negotiation.members));
    if (negotiation.cached != 0) known_.at(negotiation.cached).negotiation = nullptr;
    if (negotiation.is_join()) joined_.clear();
    at = pending_.erase(at);
  }
  for (const CacheId id : by_age_) {
    Known& known = known_.at(id);
    if (!position_in(known.members, rank)) continue;
    if (known.agreement->name.empty()) {
      refuse_running(id, known);
      continue;
    }
    // Agreed but not announced counts as pending: the rank may be gone by then.
    if (known.ready_in == decision_number_) {
      std::erase(ready_, id);
      known.ready_in = 0;
      --known.agreement->runs.count;
    } else if (known.ready.empty()) {
      continue;
    }
    const std::vector<int> waiting = ranks_of(known.ready, known.members);
    known.ready.clear();
    const Agreement& agreement = *known.agreement;
    refuse_departed({agreement.process_set, agreement.kind, 0}, agreement.name, waiting);
  }
  refuse_rounds_of_departed(rank);
}

// ---- agreeing by name -------------------------------------------------------------

Coordinator::Known* Coordinator::find_known(CacheId id) noexcept {
  const auto found = known_.find(id);
  return found == known_.end() ? nullptr : &found->second;
}

Negotiation& Coordinator::negotiation_of(const Key& key, Time now) {
  const auto [entry, fresh] = pending_.try_emplace(key);
  Negotiation& negotiation = entry->second;
  if (!fresh) return negotiation;
  negotiation.members = sets_.members(key.first);
  negotiation.present = MemberMask(negotiation.members.size());
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
    negotiation.add(request_of(known, static_cast<int>(i)), i);
  }
  known.ready.clear();
  known.negotiation = &negotiation;
  negotiation.cached = id;
}

Request Coordinator::request_of(const Known& known, int position, Turn turn) const {
  const Agreement& agreement = *known.agreement;
  const auto index = static_cast<std::size_t>(position);
  Request request;
  request.rank = known.members[index];
  request.process_set = agreement.process_set;
  request.kind = agreement.kind;
  request.op = agreement.op;
  request.dtype = agreement.dtype;
  request.dtypes = agreement.dtypes;
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
  request.turn = turn;
  if (turn != 0) {  // from where is unknown: a template serves many lines
    request.name = TurnName(agreement.kind, turn).text();
    return request;
  }
  request.name = agreement.name;
  request.where = known.where.size() == 1 ? known.where.front() : known.where[index];
  return request;
}

void Coordinator::complete(const Key& key) {
  auto node = pending_.extract(key);
  Negotiation& negotiation = node.mapped();
  if (negotiation.cached != 0) known_.at(negotiation.cached).negotiation = nullptr;
  conclude(negotiation.take_requests(), negotiation.present);
}

// Why a process set that all ranks request cannot be added; usually empty.
std::string Coordinator::why_not_add(const Agreement& agreement) const {
  std::vector<int> ranks;
  for (const Shape& rank : agreement.shapes) ranks.push_back(static_cast<int>(rank.at(0)));
  if (const auto id = sets_.find(ranks)) {
    return concat({text_of_ranks(ranks), ranks.size() == 1 ? " already is" : " already are",
                   " process set ", std::to_string(*id),
                   "; use that one, or get it from process_set_of()"});
  }
  const auto adds = [this](CacheId id) {
    return known_.at(id).agreement->kind == OpKind::kAddProcessSet;
  };
  const auto coming = static_cast<std::size_t>(std::ranges::count_if(ready_, adds));
  if (sets_.size() + coming >= kProcessSetsMax) {
    return concat(
        {"there are ", std::to_string(kProcessSetsMax),
         " process sets, including the global one, which is the limit; remove one first"});
  }
  try {
    ProcessSets(sets_.world_size()).add(std::move(ranks));
  } catch (const Failure& failure) {
    return failure.error().message;
  }
  return "";
}

std::optional<Error> Coordinator::fill_in(Agreement& agreement, std::span<const Request> requests,
                                          const MemberMask& present) const {
  const auto refuse = [&](std::string_view why) {
    return Error{ErrorCode::kInvalidArgument,
                 concat({subject(agreement.kind, agreement.name), ": ", why})};
  };
  const std::span<const int> members = sets_.members(agreement.process_set);
  const bool complete = present.count() == members.size();
  switch (agreement.kind) {
    case OpKind::kAllgather:
      if (add_up_rows(agreement, requests, present, members.size())) break;
      return refuse(
          "a tensor has no first dimension, or there are too many rows; reshape it before "
          "allgather.");
    case OpKind::kAlltoall:
      if (clear_rows(agreement)) break;
      return refuse("a tensor has no first dimension; reshape it to [1].");
    case OpKind::kBroadcast:
      if (const auto root = position_in(members, agreement.root);
          root && present.contains(static_cast<std::size_t>(*root))) {
        break;
      }
      return refuse(
          concat({"its root, rank ", std::to_string(agreement.root),
                  ", has called join() and has nothing to send; choose a root that has not."}));
    case OpKind::kAllreduce:
    case OpKind::kReducescatter:
      if (complete || agreement.op != ReduceOp::kProduct || agreement.scale.pre == 1.0) break;
      return refuse(
          "a Product with a prescale_factor has no neutral element for ranks that have called "
          "join(); scale the tensors before the call.");
    case OpKind::kJoin:
      agreement.root = last_joined_;
      break;
    case OpKind::kAddProcessSet:
      if (const std::string why = why_not_add(agreement); !why.empty()) return refuse(why);
      break;
    case OpKind::kRemoveProcessSet:
      if (sets_.contains(static_cast<ProcessSetId>(agreement.root))) break;
      return refuse(concat({"process set ", std::to_string(agreement.root), " does not exist"}));
    default:
      break;
  }
  return std::nullopt;
}

void Coordinator::conclude(std::span<const Request> requests, const MemberMask& present) {
  const Request& first = requests.front();
  const bool joins =
      std::ranges::any_of(requests, [](const Request& r) { return r.kind == OpKind::kJoin; });
  if (auto error = disagreement(requests)) {
    if (joins) joined_.clear();
    next_.refusals.push_back(
        {first.process_set, first.name, std::move(*error), first.kind, first.turn});
    return;
  }
  Agreement agreement = agreement_of(requests);
  if (auto error = fill_in(agreement, requests, present)) {
    next_.refusals.push_back(
        {first.process_set, first.name, std::move(*error), first.kind, first.turn});
    return;
  }
  const std::span<const int> members = sets_.members(first.process_set);
  if (joins) joined_.clear();
  if (first.turn != 0) {
    agreement.name.clear();
    const auto known_as = find_template(agreement);
    const CacheId id = known_as ? *known_as : define(std::move(agreement), {});
    mark_ready(id, known_.at(id), first.turn);
    return;
  }
  if (const auto id = cache_.id_of(first.process_set, first.name)) {
    Known& known = known_.at(*id);
    agreement.priority = known.agreement->priority;
    if (agreement == *known.agreement) {
      known.where = places_of(requests, members);
      mark_ready(*id, known);
      return;
    }
    agreement.priority = first.priority;
  }
  const CacheId id = define(std::move(agreement), places_of(requests, members));
  mark_ready(id, known_.at(id));
}

// ---- ids --------------------------------------------------------------------------

CacheId Coordinator::define(Agreement agreement, std::vector<std::string> where) {
  if (agreement.name.empty()) {
    keep_few_alike(agreement);
  } else if (const auto old = cache_.id_of(agreement.process_set, agreement.name)) {
    forget(*old);
  }
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

void Coordinator::mark_ready(CacheId id, Known& known, Turn turn) {
  if (turn != 0) {
    known.running.push_back(turn);
    has_turns_ = true;
  }
  known.ready_in = decision_number_;
  ++known.agreement->runs.count;
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

// Evicts the least recently used ids that no rank waits for. Ids that run in this
// very decision go last; they are at the end of by_age_.
void Coordinator::shrink_cache() {
  const auto is_idle = [](const Known& known) {
    return known.ready.empty() && known.negotiation == nullptr && known.rounds == 0;
  };
  for (auto at = by_age_.begin(); at != by_age_.end() && known_.size() > options_.cache_capacity;) {
    const CacheId id = *at++;
    if (is_idle(known_.at(id))) forget(id);
  }
}

// ---- decisions --------------------------------------------------------------------

bool Coordinator::has_decision() const noexcept { return !ready_.empty() || !next_.empty(); }

Decision Coordinator::take_decision() {
  const auto agreement_of_id = [this](CacheId id) -> const Agreement& {
    return *known_.at(id).agreement;
  };
  // What ends something runs after all that it ends, whatever the priorities.
  const auto ends = std::ranges::stable_partition(ready_, [&](CacheId id) {
    const OpKind kind = agreement_of_id(id).kind;
    return kind != OpKind::kJoin && kind != OpKind::kRemoveProcessSet;
  });
  const std::span others(ready_.begin(), ends.begin());
  next_.batches = fuse(others, agreement_of_id, options_.fusion);
  for (const CacheId id : ends) next_.batches.push_back({{id}});
  if (has_turns_) deal_out_turns();
  for (const CacheId id : ready_) {
    const Agreement& agreement = agreement_of_id(id);
    if (agreement.kind == OpKind::kRemoveProcessSet) {
      forget_set(static_cast<ProcessSetId>(agreement.root));
    }
    if (changes_membership(agreement.kind)) forget(id);  // see satisfies()
  }
  ready_.clear();
  if (known_.size() > options_.cache_capacity) shrink_cache();
  for (const CacheId id : next_.evictions) cache_.evict(id);
  ++decision_number_;
  return std::exchange(next_, {});
}

// Nothing of a set that is removed is remembered, and what its members still asked
// for fails. The ids that run in this decision run before.
void Coordinator::forget_set(ProcessSetId set) {
  for (auto at = pending_.lower_bound({set, ""}); at != pending_.end() && at->first.first == set;) {
    const auto& [key, negotiation] = *at;
    refuse_removed({set, negotiation.first.kind, negotiation.first.turn}, key.second);
    at = pending_.erase(at);
  }
  refuse_rounds_of_removed(set);
  for (auto at = by_age_.begin(); at != by_age_.end();) {
    const CacheId id = *at++;
    const Known& known = known_.at(id);
    const Agreement& agreement = *known.agreement;
    if (agreement.process_set != set) continue;
    if (!known.ready.empty()) refuse_removed({set, agreement.kind, 0}, agreement.name);
    forget(id);
  }
}

}  // namespace polyhvd
