#include "control/stall_inspector.h"

#include <algorithm>
#include <iterator>
#include <map>

#include "control/disagreement.h"
#include "control/uneven.h"

namespace polyhvd {
namespace {

constexpr std::size_t kNamesShown = 10;
constexpr std::size_t kProcessesShown = 4;
// Of the limit: an operation that has waited for so long may be what another one waits for.
constexpr double kRelevantAge = 0.25;
constexpr std::string_view kShutdownSetting = "POLYHVD_STALL_SHUTDOWN_TIME_SECONDS";

bool is_lone(const Stalled& s) { return s.ready_ranks.size() == 1; }

// The absent ranks, and those that wait without others where the line of their call is unknown.
std::vector<int> ranks_to_ask(std::span<const Stalled> stalled) {
  std::set<int> ranks;
  for (const Stalled& s : stalled) {
    ranks.insert(s.absent_ranks.begin(), s.absent_ranks.end());
    if (is_lone(s) && s.where.empty()) ranks.insert(s.ready_ranks.front());
  }
  return {ranks.begin(), ranks.end()};
}

// In the order of their first ranks.
class Groups {
 public:
  void add(std::string answer, int rank) {
    auto group = std::ranges::find(groups_, answer, [](const auto& g) { return g.first; });
    if (group == groups_.end()) group = groups_.insert(group, {std::move(answer), {}});
    group->second.push_back(rank);
  }
  auto begin() const { return groups_.begin(); }
  auto end() const { return groups_.end(); }

 private:
  std::vector<std::pair<std::string, std::vector<int>>> groups_;  // ranks with the same answer
};

std::string call_of(const Stalled& s) {
  std::string text = subject(s.kind, s.name);
  return s.where.empty() ? text : text + concat({" (", s.where, ")"});
}

std::string seconds_of(std::chrono::duration<double> time) {
  return std::to_string(static_cast<long>(time.count())) + " s";
}

// "only rank 0 has submitted allreduce 'x' (train.py:7), 61 s ago; ranks 1-3 have submitted
// nothing", on the oldest operation that a single rank waits for; empty without one.
std::string text_of_lone(std::span<const Stalled> stalled, std::span<const Stalled> pending) {
  const auto lone = std::ranges::find_if(stalled, is_lone);
  if (lone == stalled.end()) return "";
  std::map<int, const Stalled*> submitted;  // by rank, its oldest
  for (const Stalled& s : pending) {
    for (const int rank : s.ready_ranks) submitted.try_emplace(rank, &s);
  }
  Groups groups;
  for (const int rank : lone->absent_ranks) {
    const auto other = submitted.find(rank);
    groups.add(other == submitted.end() ? "nothing" : call_of(*other->second), rank);
  }
  std::string text = concat({"only ", text_of_ranks(lone->ready_ranks), " has submitted ",
                             call_of(*lone), ", ", seconds_of(lone->age), " ago"});
  for (const auto& [what, ranks] : groups) {
    text += concat({"; ", text_of_ranks(ranks),
                    ranks.size() == 1 ? " has submitted " : " have submitted ", what});
  }
  return text;
}

std::string indented(std::string_view text, std::string_view by) {
  std::string out;
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    out += concat({"\n", end > 0 ? by : "", text.substr(0, end)});
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

}  // namespace

std::string clipped(std::string text, std::size_t bytes_max) {
  constexpr std::size_t kNoteBytes = 64;
  if (text.size() <= bytes_max) return text;
  std::size_t end = bytes_max - kNoteBytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // whole UTF-8
  const std::size_t left_out = text.size() - end;
  text.resize(end);
  return text + concat({"\n... (", std::to_string(left_out), " more bytes)"});
}

std::string text_of_stalled(std::span<const Stalled> stalled) {
  using Sides = std::pair<std::vector<int>, std::vector<int>>;        // absent, ready
  std::vector<std::pair<Sides, std::vector<const Stalled*>>> groups;  // the oldest first
  for (const Stalled& s : stalled) {
    const Sides sides{s.absent_ranks, s.ready_ranks};
    auto found = std::ranges::find(groups, sides, [](const auto& group) { return group.first; });
    if (found == groups.end()) found = groups.insert(found, {sides, {}});
    found->second.push_back(&s);
  }
  std::string text;
  for (const auto& [sides, members] : groups) {
    text += concat({"\n  ", text_of_ranks(sides.second),
                    sides.second.size() == 1 ? " waits for " : " wait for ",
                    text_of_ranks(sides.first), " in ", std::to_string(members.size()),
                    members.size() == 1 ? " operation:" : " operations:"});
    for (std::size_t i = 0; i < std::min(members.size(), kNamesShown); ++i) {
      text += concat({"\n    '", members[i]->name, "', for ", seconds_of(members[i]->age)});
      const RunCount& runs = members[i]->runs;
      if (runs.is_exact && runs.count > 0) {
        text += concat({"; it is the ", ordinal(runs.count + 1), " of that name"});
      }
    }
    if (members.size() > kNamesShown) {
      text += concat({"\n    and ", std::to_string(members.size() - kNamesShown), " more"});
    }
  }
  return text;
}

StallInspector::StallInspector(StallTimes times, std::function<std::string(int)> name_of)
    : times_(times), name_of_(std::move(name_of)) {}

std::optional<std::chrono::duration<double>> StallInspector::limit() const {
  const bool warns = times_.warn.count() > 0;
  const bool ends = times_.shutdown.count() > 0;
  if (!warns && !ends) return std::nullopt;
  if (!warns || !ends) return warns ? times_.warn : times_.shutdown;
  return std::min(times_.warn, times_.shutdown);
}

bool StallInspector::is_fatal(std::span<const Stalled> stalled) const {
  return times_.shutdown.count() > 0 &&
         std::ranges::any_of(stalled, [this](const Stalled& s) { return s.age > times_.shutdown; });
}

std::optional<Inquiry> StallInspector::begin(std::span<const Stalled> stalled, Time now) {
  const bool warns = times_.warn.count() > 0 && now >= next_report_;
  if (asking_ || stalled.empty() || (!warns && !is_fatal(stalled))) return std::nullopt;
  asking_ = true;
  deadline_ = now + std::chrono::duration_cast<Time::duration>(times_.patience);
  answers_.clear();
  const std::vector<int> ranks = ranks_to_ask(stalled);
  const std::size_t asked = std::min(ranks.size(), kRanksAskedMax);
  inquiry_ = {inquiry_.number + 1, {ranks.begin(), ranks.begin() + static_cast<int>(asked)}};
  return inquiry_;
}

void StallInspector::add(Answer answer) {
  if (!asking_ || answer.inquiry != inquiry_.number) return;
  if (std::ranges::count(inquiry_.ranks, answer.rank) == 0) return;
  Answer& kept = answers_[answer.rank];
  if (kept.conclusive && !answer.conclusive) return;
  kept = std::move(answer);
}

bool StallInspector::is_complete(Time now) const {
  if (!asking_) return false;
  const auto is_known = [this](int rank) {
    const auto found = answers_.find(rank);
    return found != answers_.end() && found->second.conclusive;
  };
  return now >= deadline_ || std::ranges::all_of(inquiry_.ranks, is_known);
}

std::optional<StallReport> StallInspector::finish(std::span<const Stalled> pending, Time now,
                                                  std::string_view remark) {
  asking_ = false;
  const auto young =
      std::ranges::find_if(pending, [this](const Stalled& s) { return s.age < limit(); });
  const std::span<const Stalled> stalled(pending.begin(), young);
  if (stalled.empty()) return std::nullopt;
  const bool fatal = is_fatal(stalled);
  const bool repeats = !fatal && is_repetition(stalled, now);
  next_report_ = now + std::chrono::duration_cast<Time::duration>(times_.warn);
  last_report_ = now;
  reported_.clear();
  for (const Stalled& s : stalled) reported_.emplace(s.process_set, s.name);
  const std::string lone = text_of_lone(stalled, pending);
  if (repeats) return StallReport{text_of_repetition(stalled, lone)};
  std::string text(fatal ? "stalled for too long: " : "stalled: ");
  text += lone.empty() ? "ranks have not submitted operations that others wait for:" : lone;
  text += text_of_stalled(stalled) + text_of_answers(ranks_to_ask(stalled));
  // Of two ranks that wait for each other, one may have begun later.
  const auto recent = std::ranges::find_if(
      pending, [this](const Stalled& s) { return s.age < *limit() * kRelevantAge; });
  text += text_of_order({pending.begin(), recent});
  text += text_of_finished(stalled) + indented(remark, "  ");
  return StallReport{std::move(text), fatal};
}

// Whether the last report was about the same calls, and perhaps others that have run since.
bool StallInspector::is_repetition(std::span<const Stalled> stalled, Time now) const {
  return std::ranges::all_of(stalled, [&](const Stalled& s) {
    return s.age >= now - last_report_ && reported_.contains({s.process_set, s.name});
  });
}

std::string StallInspector::text_of_repetition(std::span<const Stalled> stalled,
                                               std::string_view lone) const {
  std::string text("still stalled: ");
  if (lone.empty()) {
    const Stalled& oldest = stalled.front();
    text +=
        concat({text_of_ranks(oldest.ready_ranks), " wait for ", text_of_ranks(oldest.absent_ranks),
                " in ", call_of(oldest), ", for ", seconds_of(oldest.age)});
  } else {
    text += lone;
  }
  if (stalled.size() > 1) {
    text += concat({"; ", std::to_string(stalled.size()), " operations are stalled"});
  }
  if (times_.shutdown.count() > 0) {
    return text + concat({"; the job ends after ", seconds_of(times_.shutdown), " (",
                          kShutdownSetting, ")"});
  }
  return text + concat({"; set ", kShutdownSetting, " to end a job that stalls"});
}

// "rank 3 (pid 812 on algo-2)"; of many, the first processes.
std::string StallInspector::heading(const std::vector<int>& ranks) const {
  std::string text = text_of_ranks(ranks) + " (";
  for (std::size_t i = 0; i < std::min(ranks.size(), kProcessesShown); ++i) {
    text += (i == 0 ? "" : "; ") + name_of_(ranks[i]);
  }
  return text + (ranks.size() > kProcessesShown ? "; ...)" : ")");
}

// Where a rank's program has ended, and others are in the middle of theirs.
std::string StallInspector::text_of_finished(std::span<const Stalled> stalled) const {
  for (const Stalled& s : stalled) {
    std::vector<int> finished;
    for (const int rank : s.absent_ranks) {
      const auto found = answers_.find(rank);
      if (found != answers_.end() && found->second.text.starts_with("alive, finished")) {
        finished.push_back(rank);
      }
    }
    if (finished.empty()) continue;
    return concat({"\n  ", text_of_ranks(finished), ":",
                   text_of_uneven(s.kind, s.name, s.runs, finished.size() == 1 ? "it" : "they",
                                  s.ready_ranks)});
  }
  return "";
}

std::string StallInspector::text_of_answers(const std::vector<int>& ranks) const {
  Groups groups;
  for (const int rank : ranks) {
    std::string answer = "not queried: only the first ranks of many are";
    if (std::ranges::count(inquiry_.ranks, rank) > 0) {
      const auto found = answers_.find(rank);
      answer = "no answer in time";
      answer += found == answers_.end()
                    ? ": it, or a rank between it and rank 0, is stopped, disconnected or very slow"
                    : ", but " + found->second.text;
      if (found != answers_.end() && found->second.conclusive) answer = found->second.text;
    }
    groups.add(std::move(answer), rank);
  }
  std::string text;
  for (const auto& [answer, members] : groups) {
    const std::size_t end = std::min(answer.find('\n'), answer.size());
    text += concat({"\n  ", heading(members), ": ", std::string_view(answer).substr(0, end)});
    text += indented(std::string_view(answer).substr(std::min(end + 1, answer.size())), "    ");
  }
  return text;
}

}  // namespace polyhvd
