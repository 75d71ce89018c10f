#include "control/uneven.h"

#include <algorithm>

#include "control/disagreement.h"

namespace polyhvd {
namespace {

constexpr std::string_view kCure =
    "give every rank the same number of batches, or call hvd.join() on every rank when its data "
    "ends";

bool waits_for_another(const Stalled& a, const Stalled& b) {
  return std::ranges::any_of(
      a.ready_ranks, [&](int rank) { return std::ranges::count(b.absent_ranks, rank) > 0; });
}

// "rank 0 is at its 121st allreduce of 'x'".
std::string place_of(const Stalled& s) {
  const bool one = s.ready_ranks.size() == 1;
  std::string text = text_of_ranks(s.ready_ranks) + (one ? " is at " : " are at ");
  if (!s.runs.is_exact) return text + subject(s.kind, s.name);
  return text + concat({one ? "its " : "their ", ordinal(s.runs.count + 1), " ", name_of(s.kind),
                        " of '", s.name, "'"});
}

}  // namespace

std::string ordinal(std::uint64_t number) {
  const std::uint64_t last = number % 10;
  const bool is_teen = number % 100 / 10 == 1;
  const char* ending = "th";
  if (!is_teen && last == 1) ending = "st";
  if (!is_teen && last == 2) ending = "nd";
  if (!is_teen && last == 3) ending = "rd";
  return std::to_string(number) + ending;
}

std::string text_of_uneven(OpKind kind, std::string_view name, const RunCount& runs,
                           std::string_view pronoun, std::span<const int> waiting) {
  const std::string what = concat({name_of(kind), " of '", name, "'"});
  const std::string others = text_of_ranks(waiting);
  const bool one = waiting.size() == 1;
  if (kind == OpKind::kJoin) {
    return concat(
        {" ", pronoun, " finished without hvd.join(), which ", others, one ? " has" : " have",
         " called: call it on every rank when its data ends, including the last rank to finish"});
  }
  if (!runs.is_exact || changes_membership(kind)) {
    return concat({" ", pronoun, " finished before an ", what, " that ", others,
                   one ? " waits" : " wait", " for: ", kCure});
  }
  if (runs.count == 0) {
    return concat(
        {" ", pronoun, " finished without any ", what, ", while ", others,
         one ? " is at its" : " are at their",
         " first: make the same calls on every rank; if only the amount of data differs, ", kCure});
  }
  const std::string_view possessive = pronoun == "they" ? "their " : "its ";
  return concat({" ", pronoun, " finished after ", possessive, ordinal(runs.count), " ", what,
                 ", while ", others, one ? " is at its " : " are at their ",
                 ordinal(runs.count + 1), ": ", kCure});
}

std::string text_of_departed(OpKind kind, std::string_view name, const RunCount& runs,
                             std::span<const int> gone, std::span<const int> waiting) {
  const bool one = gone.size() == 1;
  std::string text = concat({subject(kind, name), " needs ", text_of_ranks(gone),
                             one ? ", which has shut down" : ", which have shut down"});
  if (waiting.empty()) return text;
  return text + ":" + text_of_uneven(kind, name, runs, one ? "it" : "they", waiting);
}

std::string text_of_failed(const Departure& departure) {
  return concat({"rank ", std::to_string(departure.rank), " ", departure.words});
}

std::string text_of_order(std::span<const Stalled> stalled) {
  for (std::size_t i = 0; i < stalled.size(); ++i) {
    for (std::size_t k = i + 1; k < stalled.size(); ++k) {
      const Stalled& a = stalled[i];
      const Stalled& b = stalled[k];
      if (!waits_for_another(a, b) || !waits_for_another(b, a)) continue;
      const bool in_order = a.ready_ranks <= b.ready_ranks;
      return concat({"\n  they wait for each other: ", place_of(in_order ? a : b), ", ",
                     place_of(in_order ? b : a),
                     ".\n    Either the ranks make these calls in a different order: make them in "
                     "the same order on every rank. With PyTorch's optimizer, backward() ends when "
                     "the gradients are reduced, so an allreduce() between backward() and step() "
                     "on one rank and before backward() on "
                     "another waits for ever."
                     "\n    Or they have different numbers of batches: ",
                     kCure, "."});
    }
  }
  return "";
}

}  // namespace polyhvd
