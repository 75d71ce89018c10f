#include "engine/stall_watch.h"

#include <algorithm>
#include <utility>

#include "control/disagreement.h"

namespace polyhvd {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kInspectionInterval = std::chrono::seconds(1);
// For the interpreter to come up with its stacks. An answer is to reach rank 0 in
// time even if this rank looks at its messages only once a second.
constexpr auto kStacksPatience = std::chrono::milliseconds(700);
constexpr std::size_t kNamesShown = 10;
// A rank that has not looked for so long was stopped itself, and that time does not concern rank 0.
constexpr auto kAway = std::chrono::seconds(3);
// Of a report in an error, which every rank gets, also through shared memory.
constexpr std::size_t kErrorBytesMax = 60 << 10;

}  // namespace

StallWatch::StallWatch(int rank, StallTimes times, Controller& controller, const OpQueue& queue,
                       const Liveness& liveness, std::shared_ptr<Mailbox> mailbox,
                       std::function<void(const std::string&)> log)
    : rank_(rank),
      times_(times),
      controller_(controller),
      queue_(queue),
      liveness_(liveness),
      mailbox_(std::move(mailbox)),
      log_(std::move(log)),
      inspector_(times, [&liveness](int other) { return liveness.name_of(other); }) {}

void StallWatch::check(bool executing) {
  const Time now = Clock::now();
  if (const auto inquiry = controller_.take_inquiry()) begin_answer(*inquiry, now);
  if (answering_) finish_answer(now);
  if (inspector_.is_asking() || now >= next_inspection_) inspect(now, executing);
}

void StallWatch::note_ran(const Submission& submission) {
  last_kind_ = submission.kind;
  last_name_ = submission.name;
}

// Answering -------------------------------------------------------------------

void StallWatch::begin_answer(const Inquiry& inquiry, Time now) {
  look_at_others(inquiry);
  if (std::ranges::count(inquiry.ranks, rank_) == 0) return;
  answering_ = true;
  inquiry_ = inquiry.number;
  answer_by_ = now + kStacksPatience;
  if (mailbox_) mailbox_->ask_stacks();
}

void StallWatch::look_at_others(const Inquiry& inquiry) {
  for (const int rank : inquiry.ranks) {
    if (rank == rank_) continue;
    if (auto state = liveness_.look_at(rank)) {
      controller_.answer({inquiry.number, rank, !state->may_answer, std::move(state->text)});
    }
  }
}

void StallWatch::finish_answer(Time now) {
  std::optional<std::string> stacks = mailbox_ ? mailbox_->take_stacks() : std::string();
  if (!stacks && now < answer_by_) return;
  answering_ = false;
  if (!stacks) {
    stacks =
        "but its Python interpreter does not respond: native code holds the GIL, or the process "
        "gets too little CPU time\n";
    *stacks += mailbox_->dump_stacks();
  }
  const std::size_t end = std::min(stacks->find('\n'), stacks->size());
  std::string text("alive");
  if (end > 0) text += ", " + stacks->substr(0, end);
  text += "; " + own_part() + stacks->substr(end);
  controller_.answer({inquiry_, rank_, true, clipped(std::move(text), kAnswerBytesMax)});
}

// What it last ran, and what it waits for itself.
std::string StallWatch::own_part() const {
  std::string text = last_name_.empty() ? std::string("it has run no operation yet")
                                        : concat({"it last ran ", subject(last_kind_, last_name_)});
  const std::string pending = text_of_pending();
  return text +
         (pending.empty() ? "; it has submitted nothing since" : "; it waits for " + pending);
}

std::string StallWatch::text_of_pending() const {
  std::string text;
  const std::vector<std::string> pending = queue_.in_flight();
  for (std::size_t i = 0; i < std::min(pending.size(), kNamesShown); ++i) {
    text += concat({i == 0 ? "" : ", ", pending[i]});
  }
  if (pending.size() > kNamesShown) {
    text += concat({" and ", std::to_string(pending.size() - kNamesShown), " more"});
  }
  return text;
}

// Reporting, on rank 0 -----------------------------------------------------------

void StallWatch::inspect(Time now, bool executing) {
  next_inspection_ = now + kInspectionInterval;
  const auto limit = inspector_.limit();
  if (!limit) return;
  if (!controller_.is_root()) return look_at_root(now, executing);
  for (Answer& answer : controller_.take_answers()) inspector_.add(std::move(answer));
  if (inspector_.is_asking() && !inspector_.is_complete(now)) return;
  const std::vector<Stalled> stalled = controller_.stalled(*limit);
  if (!inspector_.is_asking()) {
    const auto inquiry = inspector_.begin(stalled, now);
    if (inquiry) controller_.ask(*inquiry);
    return;
  }
  const std::string remark = mailbox_ ? mailbox_->remarked() : std::string();
  // Also of younger operations, which show where the absent ranks are.
  const std::vector<Stalled> pending =
      stalled.empty() ? stalled : controller_.stalled(std::chrono::seconds(0));
  const auto report = inspector_.finish(pending, now, remark);
  if (!report) return;
  const std::string error = clipped(report->text, kErrorBytesMax);
  if (!report->fatal || error.size() < report->text.size()) log_(report->text);
  if (report->fatal) throw Failure(ErrorCode::kTimeout, error);
}

// On the other ranks ----------------------------------------------------------------

// Without rank 0 nothing is agreed on and no stall is reported.
void StallWatch::look_at_root(Time now, bool executing) {
  const auto away = now - std::exchange(looked_at_root_, now);
  const bool waits = queue_.pending() > 0 && !executing;
  const auto state = waits ? liveness_.look_beside(0) : std::nullopt;
  if (!state || state->may_answer) {
    root_stopped_at_.reset();
    return;
  }
  if (!root_stopped_at_) {
    root_stopped_at_ = now;
    next_root_report_ = now + std::chrono::duration_cast<Time::duration>(times_.warn);
  } else if (away > kAway) {
    *root_stopped_at_ += away;
    if (next_root_report_ != Time::max()) next_root_report_ += away;
  }
  const std::chrono::duration<double> still = now - *root_stopped_at_;
  const auto still_s = std::chrono::duration_cast<std::chrono::seconds>(still).count();
  const std::string text =
      concat({"rank ", std::to_string(rank_), " waits for rank 0 in ", text_of_pending(), ", for ",
              std::to_string(still_s), " s\n  rank 0 (", liveness_.name_of(0), "): ", state->text});
  if (times_.shutdown.count() > 0 && still > times_.shutdown) {
    throw Failure(ErrorCode::kTimeout, "stalled for too long: " + text);
  }
  if (times_.warn.count() <= 0 || now < next_root_report_) return;
  // Every rank of this host reports it once, and the first that can repeats it.
  bool is_first = true;
  for (int rank = 1; rank < rank_ && is_first; ++rank) {
    const auto other = liveness_.look_beside(rank);
    is_first = !other || !other->may_answer;
  }
  next_root_report_ =
      is_first ? now + std::chrono::duration_cast<Time::duration>(times_.warn) : Time::max();
  log_("stalled: " + text);
}

}  // namespace polyhvd
