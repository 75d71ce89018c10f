// Decides on rank 0 when a stall is reported, which ranks to ask about it first, and
// the text of the report. Pure: no I/O, thread or clock (time is an argument).
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "control/coordinator.h"
#include "control/inquiry.h"

namespace polyhvd {

struct StallTimes {
  std::chrono::duration<double> warn{60.0};     // zero: no reports
  std::chrono::duration<double> shutdown{0.0};  // zero: never
  std::chrono::duration<double> patience{2.0};  // for answers
};

struct StallReport {
  std::string text;
  bool fatal = false;  // the stall has lasted longer than `shutdown`
};

class StallInspector {
 public:
  // `name_of` describes the process of a rank: "pid 812 on algo-2".
  StallInspector(StallTimes times, std::function<std::string(int rank)> name_of);

  // The age from which on a stall matters; nothing when none ever does.
  std::optional<std::chrono::duration<double>> limit() const;

  // Whether answers are awaited; poll often then.
  bool is_asking() const noexcept { return asking_; }

  // Begins an inquiry if one is due. `stalled` are those older than limit(), the oldest first.
  std::optional<Inquiry> begin(std::span<const Stalled> stalled, Time now);
  // Answers to earlier inquiries are dropped.
  void add(Answer answer);
  // The report, once all have answered or their time is over, on what is older than
  // limit() by then; nothing if that is nothing. `pending` are all operations that wait, the
  // oldest first. A report on operations that the one before was about is one line. `remark`
  // ends the others.
  bool is_complete(Time now) const;
  std::optional<StallReport> finish(std::span<const Stalled> pending, Time now,
                                    std::string_view remark = {});

 private:
  bool is_fatal(std::span<const Stalled> stalled) const;
  bool is_repetition(std::span<const Stalled> stalled, Time now) const;
  std::string text_of_repetition(std::span<const Stalled> stalled, std::string_view lone) const;
  std::string text_of_answers(const std::vector<int>& ranks) const;
  std::string text_of_finished(std::span<const Stalled> stalled) const;
  std::string heading(const std::vector<int>& ranks) const;

  const StallTimes times_;
  const std::function<std::string(int)> name_of_;
  bool asking_ = false;
  Inquiry inquiry_;
  std::map<int, Answer> answers_;  // by rank
  Time deadline_{};
  Time next_report_{};
  Time last_report_{};
  std::set<std::pair<ProcessSetId, std::string>> reported_;  // that it was about
};

// Lines with the operations and the ranks that they wait for, grouped by ranks.
std::string text_of_stalled(std::span<const Stalled> stalled);

// `text` in at most `bytes_max` bytes, with a note on what is left out.
std::string clipped(std::string text, std::size_t bytes_max);

}  // namespace polyhvd
