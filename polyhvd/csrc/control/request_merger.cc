#include "control/request_merger.h"

#include <utility>

namespace polyhvd {
namespace {

// Programs that make names up would fill memory with them: beyond this, nothing is held.
constexpr std::size_t kNamesMax = 1 << 16;

}  // namespace

bool RequestMerger::takes(const Request& request) const {
  return seen_before_.size() < kNamesMax &&
         !seen_before_.contains({request.process_set, request.name});
}

void RequestMerger::pass_over(const Request& request) {
  if (seen_before_.size() < kNamesMax) seen_before_.insert({request.process_set, request.name});
}

void RequestMerger::add(const Request& request, const MemberMask& members, Time now, Report& out) {
  const Key key{request.process_set, request.name};
  const auto [entry, is_new] = held_.try_emplace(key);
  Held& held = entry->second;
  if (is_new) {
    held.request = request;
    held.seen = MemberMask(sets_.members(request.process_set).size());
    held.since = now;
    held.place = by_age_.insert(by_age_.end(), key);
  }
  if (!asks_alike(held.request, request)) let_go(held, out);
  if (!held.seen.merge(members)) {
    // The round before was refused above, and this belongs to the next. The coordinator
    // judges; nothing is merged any more.
    let_go(held, out);
    held.seen = members;
  }
  const bool is_whole = held.seen.count() == subtree_.members(request.process_set).count();
  if (held.passed_on) {
    pass(request, members, out);
  } else if (is_whole) {
    out.subtree_requests.push_back(std::move(held.request));
    by_age_.erase(held.place);
  }
  if (is_whole) forget(entry);
}

void RequestMerger::release_older(Time before, Report& out) {
  while (!by_age_.empty()) {
    Held& held = held_.at(by_age_.front());
    if (held.since > before) return;
    let_go(held, out);
  }
}

void RequestMerger::release(ProcessSetId set, Report& out) {
  auto entry = held_.lower_bound({set, std::string()});
  while (entry != held_.end() && entry->first.first == set) {
    let_go(entry->second, out);
    forget(entry++);
  }
}

void RequestMerger::release_all(Report& out) {
  for (auto entry = held_.begin(); entry != held_.end();) {
    let_go(entry->second, out);
    forget(entry++);
  }
}

void RequestMerger::forget(Entries::iterator entry) {
  if (seen_before_.size() < kNamesMax) seen_before_.insert(entry->first);
  held_.erase(entry);
}

void RequestMerger::let_go(Held& held, Report& out) {
  if (std::exchange(held.passed_on, true)) return;
  by_age_.erase(held.place);
  pass(held.request, held.seen, out);
}

void RequestMerger::pass(const Request& request, const MemberMask& members, Report& out) const {
  const std::span<const int> ranks = sets_.members(request.process_set);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (!members.contains(i)) continue;
    out.requests.push_back(request);
    out.requests.back().rank = ranks[i];
  }
}

}  // namespace polyhvd
