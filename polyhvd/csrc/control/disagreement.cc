#include "control/disagreement.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string_view>
#include <tuple>
#include <vector>

namespace polyhvd {

std::string concat(std::initializer_list<std::string_view> parts) {
  std::string text;
  for (const std::string_view part : parts) text += part;
  return text;
}

std::string subject(OpKind kind, std::string_view name) {
  return concat({name_of(kind), " '", name, "'"});
}

std::string without_controls(std::string_view text) {
  const auto code = [text](std::size_t at) { return static_cast<unsigned char>(text[at]); };
  std::string shown;
  shown.reserve(text.size());
  for (std::size_t at = 0; at < text.size(); ++at) {
    unsigned control = code(at);
    // U+0080 to U+009F; in UTF-8 other bytes above 0x7f are not control characters.
    const bool is_c1 = control == 0xc2 && at + 1 < text.size() && (code(at + 1) & 0xe0) == 0x80;
    if (is_c1) control = code(++at);
    if (!is_c1 && (control == '\n' || control == '\t' || (control >= 0x20 && control != 0x7f))) {
      shown += text[at];
      continue;
    }
    char escaped[8];
    std::snprintf(escaped, sizeof escaped, "\\x%02x", control);
    shown += escaped;
  }
  return shown;
}

std::string text_of_ranks(std::span<const int> ranks) {
  std::string text(ranks.size() == 1 ? "rank " : "ranks ");
  for (std::size_t first = 0; first < ranks.size();) {
    std::size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (first > 0) text += ", ";
    text += std::to_string(ranks[first]);
    if (last > first) {
      text += last == first + 1 ? ", " : "-";
      text += std::to_string(ranks[last]);
    }
    first = last + 1;
  }
  return text;
}

namespace {

// Beyond this many ranks, the rows of an allgather are not told apart.
constexpr std::size_t kRowsShownMax = 8;
// Beyond this many tensors, a side names the first two.
constexpr std::size_t kTensorsShownMax = 4;

std::string quoted(std::string_view name) { return concat({"'", name, "'"}); }

std::string text_of_number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%g", value);
  // Two factors that differ must not look the same.
  if (std::strtod(text, nullptr) != value) std::snprintf(text, sizeof text, "%.17g", value);
  return text;
}

// How a side is described: one request among all of its operation.
struct Side {
  const Request& request;
  std::size_t tensor;  // the first that differs; meaningful for shapes only
  bool shows_rows;     // whether the first dimension of an allgather is printed
};

std::string text_of_shape(const Side& side, const Shape& shape) {
  std::string text("[");
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i > 0) text += ", ";
    const OpKind kind = side.request.kind;
    if (i == 0 && (kind == OpKind::kAlltoall || (kind == OpKind::kAllgather && !side.shows_rows))) {
      text += '*';
    } else {
      text += std::to_string(shape[i]);
    }
  }
  text += ']';
  return text;
}

std::string text_of_tensors(const Side& side) {
  const std::vector<Shape>& shapes = side.request.shapes;
  std::string text(name_of(side.request.dtype));
  const std::size_t shown = shapes.size() <= kTensorsShownMax ? shapes.size() : 2;
  for (std::size_t i = 0; i < shown; ++i) {
    text += i == 0 ? " " : ", ";
    if (i > 0 && !side.request.dtypes.empty()) {
      text += concat({name_of(side.request.dtypes[i]), " "});
    }
    text += text_of_shape(side, shapes[i]);
  }
  if (shown < shapes.size()) {
    text += concat({", ... (", std::to_string(shapes.size()), " tensors)"});
  }
  return text;
}

std::string text_of_kind(const Side& side) {
  const std::string_view kind = name_of(side.request.kind);
  if (!has_tensors(side.request.kind)) return std::string(kind);
  return concat({kind, " of ", text_of_tensors(side)});
}

std::string text_of_op(const Side& side) {
  return concat({text_of_tensors(side), " with op ", name_of(side.request.op)});
}

std::string text_of_scale(const Side& side) {
  const Scale& scale = side.request.scale;
  return concat({text_of_tensors(side), " with prescale ", text_of_number(scale.pre),
                 " and postscale ", text_of_number(scale.post)});
}

std::string text_of_root(const Side& side) {
  return concat({text_of_tensors(side), " with root rank ", std::to_string(side.request.root)});
}

std::string text_of_set(const Side& side) {
  if (side.request.kind == OpKind::kRemoveProcessSet) {
    return concat({"process set ", std::to_string(side.request.root)});
  }
  std::string text("ranks [");
  for (const Shape& rank : side.request.shapes) {
    if (text.back() != '[') text += ", ";
    text += std::to_string(rank.front());
  }
  return text + "]";
}

std::string text_of_device(const Side& side) {
  return concat({text_of_tensors(side),
                 side.request.device == DeviceKind::kCuda ? " on a GPU" : " on the CPU"});
}

std::string text_of_count(const Side& side) {
  const std::size_t count = side.request.shapes.size();
  return concat(
      {std::to_string(count), count == 1 ? " tensor, " : " tensors, ", text_of_tensors(side)});
}

std::string text_of_differing_shape(const Side& side) {
  const std::vector<Shape>& shapes = side.request.shapes;
  if (shapes.size() == 1) return text_of_tensors(side);
  return concat({"tensor ", std::to_string(side.tensor), " of ", std::to_string(shapes.size()),
                 " as ", name_of(dtype_of(side.request, side.tensor)), " ",
                 text_of_shape(side, shapes[side.tensor])});
}

// Whether an operation can run on two such tensors.
bool shapes_agree(OpKind kind, const Shape& a, const Shape& b) {
  if (!has_own_rows(kind)) return a == b;
  return a.size() == b.size() && (a.empty() || std::equal(a.begin() + 1, a.end(), b.begin() + 1));
}

// The first tensor whose shapes differ, or the number of tensors.
std::size_t first_difference(const Request& a, const Request& b) {
  std::size_t i = 0;
  while (i < a.shapes.size() && shapes_agree(a.kind, a.shapes[i], b.shapes[i])) ++i;
  return i;
}

// One thing on which the ranks must agree. Checked in order; a rule may rely on
// those before it.
struct Rule {
  bool (*agree)(const Request&, const Request&);
  std::string_view title;  // "%" stands for the kind of operation
  std::string (*describe)(const Side&);
  std::string_view advice;
};

constexpr Rule kRules[] = {
    {[](const Request& a, const Request& b) { return a.kind == b.kind; },
     "Mismatched collective operations", text_of_kind,
     "call the same operation under a name on every rank"},
    {[](const Request& a, const Request& b) {
       const bool changes_sets =
           a.kind == OpKind::kAddProcessSet || a.kind == OpKind::kRemoveProcessSet;
       return !changes_sets || (a.root == b.root && a.shapes == b.shapes);
     },
     "Mismatched process sets", text_of_set, "name the same process set on every rank"},
    {[](const Request& a, const Request& b) {
       return !has_tensors(a.kind) || (a.dtype == b.dtype && a.dtypes == b.dtypes);
     },
     "Mismatched data types", text_of_tensors, ""},
    {[](const Request& a, const Request& b) { return !reduces(a.kind) || a.op == b.op; },
     "Mismatched reduction operations", text_of_op, "pass the same op on every rank"},
    {[](const Request& a, const Request& b) { return !reduces(a.kind) || a.scale == b.scale; },
     "Mismatched prescale and/or postscale factors", text_of_scale,
     "pass the same prescale_factor and postscale_factor on every rank"},
    {[](const Request& a, const Request& b) {
       return a.kind != OpKind::kBroadcast || a.root == b.root;
     },
     "Mismatched root ranks", text_of_root, "pass the same root_rank on every rank"},
    {[](const Request& a, const Request& b) {
       return !has_tensors(a.kind) || a.device == b.device;
     },
     "Mismatched devices", text_of_device,
     "move the tensor to the same kind of device on every rank"},
    {[](const Request& a, const Request& b) {
       return !has_tensors(a.kind) || a.shapes.size() == b.shapes.size();
     },
     "Mismatched numbers of tensors", text_of_count,
     "pass the same tensors in the same order on every rank"},
    {[](const Request& a, const Request& b) {
       return !has_tensors(a.kind) || first_difference(a, b) == a.shapes.size();
     },
     "Mismatched % tensor shapes", text_of_differing_shape, ""},
};

// What to do about a rule that has no fixed advice: it depends on the kind.
std::string_view advice_on(const Rule& rule, OpKind kind) {
  if (!rule.advice.empty()) return rule.advice;
  const bool shapes = rule.describe == text_of_differing_shape;
  switch (kind) {
    case OpKind::kAllreduce:
    case OpKind::kReducescatter:
      return shapes ? "pass the same shape on every rank" : "cast before reducing";
    case OpKind::kAllgather:
      return shapes ? "all dimensions except the first must match" : "cast before gathering";
    case OpKind::kAlltoall:
      return shapes ? "all dimensions except the first must match" : "cast before exchanging";
    default:
      return shapes ? "pass a tensor of the root's shape on every rank"
                    : "cast before broadcasting";
  }
}

// Every rank's side, ranks that say the same together, the fewest first: the odd
// one out is what the reader looks for.
std::string text_of_sides(const Rule& rule, std::span<const Request> requests) {
  std::size_t tensor = 0;
  if (rule.describe == text_of_differing_shape) {
    tensor = requests.front().shapes.size();
    for (const Request& request : requests) {
      tensor = std::min(tensor, first_difference(requests.front(), request));
    }
  }
  std::map<std::string, std::vector<int>> ranks_by_side;
  for (const Request& request : requests) {
    std::string text = rule.describe({request, tensor, requests.size() <= kRowsShownMax});
    if (!request.where.empty()) text += concat({" (", request.where, ")"});
    ranks_by_side[std::move(text)].push_back(request.rank);
  }
  using Group = std::pair<std::string, std::vector<int>>;
  std::vector<Group> groups(ranks_by_side.begin(), ranks_by_side.end());
  std::sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) {
    return std::pair(a.second.size(), a.second) < std::pair(b.second.size(), b.second);
  });
  std::string text;
  for (const auto& [side, ranks] : groups) {
    text += concat({text_of_ranks(ranks), " sent ", side, "; "});
  }
  return text;
}

}  // namespace

std::optional<Error> disagreement(std::span<const Request> requests) {
  const Request& first = requests.front();
  for (const Rule& rule : kRules) {
    const bool agree = std::all_of(requests.begin(), requests.end(),
                                   [&](const Request& other) { return rule.agree(first, other); });
    if (agree) continue;
    std::string message(rule.title);
    if (const auto place = message.find('%'); place != std::string::npos) {
      message.replace(place, 1, name_of(first.kind));
    }
    const bool kinds_differ = &rule == &kRules[0];
    message += concat({": ", kinds_differ ? quoted(first.name) : subject(first.kind, first.name),
                       ": ", text_of_sides(rule, requests), advice_on(rule, first.kind), "."});
    return Error{ErrorCode::kRankMismatch, std::move(message)};
  }
  return std::nullopt;
}

}  // namespace polyhvd
