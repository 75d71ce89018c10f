#include "control/negotiation.h"

#include <algorithm>
#include <utility>

namespace polyhvd {

bool Negotiation::add(Request request, std::size_t position) {
  const bool is_first = present.empty();
  if (!present.insert(position)) return false;
  if (is_first) {
    first = std::move(request);
  } else if (!asks_alike(first, request)) {
    others.emplace(position, std::move(request));
  }
  return true;
}

bool Negotiation::add(const Request& request, const MemberMask& sides) {
  const bool is_first = present.empty();
  if (!present.merge(sides)) return false;
  if (is_first) {
    first = request;
  } else if (!asks_alike(first, request)) {
    for (std::size_t i = 0; i < members.size(); ++i) {
      if (sides.contains(i)) others.emplace(i, request).first->second.rank = members[i];
    }
  }
  return true;
}

std::vector<Request> Negotiation::take_requests() {
  std::vector<Request> requests;
  if (others.empty()) {
    requests.push_back(std::move(first));
    return requests;
  }
  for (std::size_t i = 0; i < members.size(); ++i) {
    if (!present.contains(i)) continue;
    const auto other = others.find(i);
    requests.push_back(other != others.end() ? std::move(other->second) : first);
    requests.back().rank = members[i];
  }
  return requests;
}

bool Negotiation::is_join() const {
  const auto joins = [](const auto& other) { return other.second.kind == OpKind::kJoin; };
  return first.kind == OpKind::kJoin || std::ranges::any_of(others, joins);
}

bool clear_rows(Agreement& agreement) {
  for (Shape& shape : agreement.shapes) {
    if (shape.empty()) return false;
    shape[0] = 0;
  }
  return true;
}

bool add_up_rows(Agreement& agreement, std::span<const Request> requests, const MemberMask& present,
                 std::size_t members) {
  if (!clear_rows(agreement)) return false;
  const std::size_t count = agreement.shapes.size();
  agreement.rows.assign(members * count, 0);
  auto request = requests.begin();
  for (std::size_t position = 0; position < members; ++position) {
    if (!present.contains(position)) continue;
    for (std::size_t i = 0; i < count; ++i) {
      const std::int64_t rows = request->shapes[i][0];
      std::int64_t& sum = agreement.shapes[i][0];
      if (__builtin_add_overflow(sum, rows, &sum)) return false;
      agreement.rows[position * count + i] = rows;
    }
    if (requests.size() > 1) ++request;
  }
  return true;
}

Agreement agreement_of(std::span<const Request> requests) {
  const Request& first = requests.front();
  Agreement agreement;
  agreement.process_set = first.process_set;
  agreement.kind = first.kind;
  agreement.op = first.op;
  agreement.dtype = first.dtype;
  agreement.dtypes = first.dtypes;
  agreement.device = first.device;
  agreement.root = first.root;
  agreement.priority = first.priority;
  agreement.scale = first.scale;
  agreement.shapes = first.shapes;
  agreement.name = first.name;
  return agreement;
}

std::vector<std::string> places_of(std::span<const Request> requests,
                                   std::span<const int> members) {
  const bool all_equal = std::all_of(requests.begin(), requests.end(), [&](const Request& other) {
    return other.where == requests.front().where;
  });
  if (all_equal) return {requests.front().where};
  std::vector<std::string> places(members.size());
  for (const Request& request : requests) {
    places[static_cast<std::size_t>(*position_in(members, request.rank))] = request.where;
  }
  return places;
}

}  // namespace polyhvd
