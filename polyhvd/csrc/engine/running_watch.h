// Watches the operation that this rank runs: reports when nothing of it has moved for long, and
// ends the job if a setting asks for that. Each rank watches its own, so that it does not matter
// which one has stopped. Driver only; never blocks.
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <string>

#include "control/stall_inspector.h"
#include "engine/controller.h"
#include "engine/liveness.h"
#include "engine/parking.h"

namespace polyhvd {

class RunningWatch {
 public:
  // All must outlive this.
  RunningWatch(int rank, StallTimes times, const ProcessSets& sets, const Parking& parking,
               const Liveness& liveness, const std::function<void(const std::string&)>& log)
      : rank_(rank),
        times_(times),
        sets_(sets),
        parking_(parking),
        liveness_(liveness),
        log_(log) {}

  // While one lives, `work` runs. `work` stays as it is for as long.
  class Run {
   public:
    Run(RunningWatch& watch, const Work& work, Time now) noexcept : watch_(watch) {
      watch_.work_ = &work;
      watch_.moved_at_ = watch_.looked_at_ = now;
      watch_.moves_ = watch_.parking_.moves();
      watch_.is_reported_ = false;
    }
    ~Run() { watch_.work_ = nullptr; }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;

   private:
    RunningWatch& watch_;
  };

  // To be called now and then, also while an operation runs. True, once for each, when nothing
  // of it has moved for as long as is reported. Throws Failure(kTimeout) when that is to end
  // the job.
  bool check(Time now);

 private:
  struct Report {
    std::string text;
    bool names_cause = false;  // a rank of this host is stopped or dead
  };
  Report report(Time now) const;
  std::string text_of(int rank) const;

  const int rank_;
  const StallTimes times_;
  const ProcessSets& sets_;
  const Parking& parking_;
  const Liveness& liveness_;
  const std::function<void(const std::string&)>& log_;

  const Work* work_ = nullptr;
  Time moved_at_{};          // when something moved, as far as was looked
  Time looked_at_{};         // when it was last looked
  std::uint64_t moves_ = 0;  // parking_'s at moved_at_
  bool is_reported_ = false;
  Time next_report_{};
};

}  // namespace polyhvd
