// One rank's part in explaining stalls: answers inquiries about itself, looks at
// processes of its host, and on rank 0 has the StallInspector's reports written. The others look
// whether rank 0 itself is stopped.
// Driver only; never blocks.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "control/stall_inspector.h"
#include "engine/controller.h"
#include "engine/liveness.h"
#include "engine/op_queue.h"
#include "observe/mailbox.h"

namespace polyhvd {

class StallWatch {
 public:
  // All but `mailbox`, which may be null, must outlive this.
  StallWatch(int rank, StallTimes times, Controller& controller, const OpQueue& queue,
             const Liveness& liveness, std::shared_ptr<Mailbox> mailbox,
             std::function<void(const std::string&)> log);

  // To be called about once a second, and after control traffic. `executing`: an operation runs,
  // which RunningWatch reports on. Throws Failure(kTimeout) with the report when a stall is to end
  // the job.
  void check(bool executing);

  // An operation of this rank has run.
  void note_ran(const Submission& submission);

 private:
  void begin_answer(const Inquiry& inquiry, Time now);
  void look_at_others(const Inquiry& inquiry);
  void finish_answer(Time now);
  std::string own_part() const;
  void inspect(Time now, bool executing);
  void look_at_root(Time now, bool executing);
  std::string text_of_pending() const;

  const int rank_;
  const StallTimes times_;
  Controller& controller_;
  const OpQueue& queue_;
  const Liveness& liveness_;
  const std::shared_ptr<Mailbox> mailbox_;
  const std::function<void(const std::string&)> log_;

  StallInspector inspector_;  // of use on rank 0
  Time next_inspection_{};
  std::optional<Time> root_stopped_at_;  // seen stopped since, while this rank waits
  Time looked_at_root_{};
  Time next_root_report_{};
  bool answering_ = false;
  std::uint32_t inquiry_ = 0;  // that is being answered
  Time answer_by_{};
  OpKind last_kind_ = OpKind::kBarrier;
  std::string last_name_;  // that ran; empty: none yet
};

}  // namespace polyhvd
