#include "engine/running_watch.h"

#include <algorithm>
#include <utility>

#include "control/disagreement.h"

namespace polyhvd {
namespace {

constexpr std::size_t kRanksShown = 10;
// A wait looks ten times a second. Who has not for so long was stopped itself, as when a whole
// job is suspended, and that time does not concern the others.
constexpr auto kAway = std::chrono::seconds(2);

}  // namespace

bool RunningWatch::check(Time now) {
  if (work_ == nullptr) return false;
  const auto away = now - std::exchange(looked_at_, now);
  if (away > kAway) moved_at_ += away;
  if (const std::uint64_t moves = parking_.moves(); moves != moves_) {
    moves_ = moves;
    moved_at_ = now;
    return false;
  }
  const std::chrono::duration<double> still = now - moved_at_;
  if (times_.shutdown.count() > 0 && still > times_.shutdown) {
    Report found = report(now);
    // The rank that sees the reason ends the job first, so that all ranks receive it.
    if (found.names_cause || still > times_.shutdown + times_.patience) {
      throw Failure(ErrorCode::kTimeout, "stalled for too long: " + std::move(found.text));
    }
  }
  if (times_.warn.count() <= 0 || still < times_.warn || (is_reported_ && now < next_report_)) {
    return false;
  }
  next_report_ = now + std::chrono::duration_cast<Time::duration>(times_.warn);
  const std::span<const int> members = sets_.members(work_->process_set);
  // One report of a host is enough: that of the first rank that can.
  const bool is_first = std::ranges::none_of(members, [this](int rank) {
    const auto state = rank < rank_ ? liveness_.look_beside(rank) : std::nullopt;
    return state && state->may_answer;
  });
  if (is_first) log_("rank " + std::to_string(rank_) + ": " + report(now).text);
  return !std::exchange(is_reported_, true);
}

// "rank 1 (pid 812 on algo-2)".
std::string RunningWatch::text_of(int rank) const {
  return concat({"rank ", std::to_string(rank), " (", liveness_.name_of(rank), ")"});
}

RunningWatch::Report RunningWatch::report(Time now) const {
  const auto still_s =
      std::to_string(std::chrono::duration_cast<std::chrono::seconds>(now - moved_at_).count());
  const Submission& first = work_->operations[0]->submission;
  const std::size_t others = work_->operations.size() - 1;
  std::string text = "a running operation makes no progress: " + subject(first.kind, first.name);
  if (others > 0) text += concat({" and ", std::to_string(others), " more in its batch"});
  if (first.process_set != kWorld) {
    text += " of process set " + std::to_string(first.process_set);
  }
  text += concat({", for ", still_s, " s; rank ", std::to_string(rank_)});
  const int waits_for = parking_.waits_for();
  text += waits_for < 0 ? " waits for the others" : " waits for " + text_of(waits_for);
  std::size_t found = 0;
  for (const int rank : sets_.members(work_->process_set)) {
    const auto state = rank == rank_ ? std::nullopt : liveness_.look_beside(rank);
    if (!state || (state->may_answer && state->text.find("waits") == std::string::npos)) continue;
    if (++found > kRanksShown) continue;
    text += concat({"\n  ", text_of(rank), ": ", state->text});
  }
  if (found > kRanksShown) {
    text += concat({"\n  and ", std::to_string(found - kRanksShown), " more like these"});
  }
  if (found == 0) {
    text +=
        "\n  no other rank of this host is stopped or dead; check the rank that this one waits "
        "for: it may be stopped, swapped out or disconnected, or be waiting for such a rank itself";
  }
  return {std::move(text), found > 0};
}

}  // namespace polyhvd
