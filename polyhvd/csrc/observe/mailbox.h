// What the engine's threads leave for a thread of the program's language to do.
// They never call into it themselves: they would wait for its lock, and may not
// touch it at all while it ends. Thread-safe; no call of the engine's blocks.
#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <optional>
#include <string>

#include "observe/lock_order.h"
#include "observe/step_meter.h"

namespace polyhvd {

class Mailbox {
 public:
  using Clock = std::chrono::steady_clock;
  struct Line {
    std::string text;
    bool is_debug = false;  // only for whoever looks for a fault; else it is a warning
    Clock::time_point since{};
  };

  // `signal`, sent to any thread, makes the program write its stacks to
  // `descriptor` without its lock; 0 when it cannot.
  explicit Mailbox(int signal = 0, int descriptor = -1)
      : signal_(signal), descriptor_(descriptor) {}

  // The engine's side. A line that is not taken within a second is written to
  // standard error by a later tick(), unless it is for debugging: the program's lock may be held
  // for long.
  void log(std::string text, bool is_debug = false);
  void tick();

  // How fast the job is; one that is not taken is replaced.
  void post(const StepSample& sample);

  // Asks for the stacks of all the program's threads; take_stacks() has them later,
  // once, after `on_stacks` was called, on any thread.
  void ask_stacks();
  std::optional<std::string> take_stacks();
  void set_on_stacks(std::function<void()> on_stacks);
  // What can be reported about them while the program's lock is held; may be empty.
  std::string dump_stacks() const;
  // What the program has remarked last.
  std::string remarked();

  // The program's side. Blocks until there is something to take; false once closed
  // and empty. Called without the program's lock, take_line() with it: lines that no caller
  // can take yet stay here.
  bool wait();
  std::optional<Line> take_line();
  std::optional<StepSample> take_sample();
  // Whether stacks are requested. The first line of an answer has in short where
  // the program is; each further line is one of the stacks.
  bool take_question();
  void answer(std::string stacks);
  // Text to add to stall reports; empty: nothing.
  void remark(std::string text);
  // From now on warnings are written to standard error at once.
  void close();

 private:
  OrderedMutex<LockRank::mailbox> mutex_;
  OrderedCondition news_;
  std::deque<Line> lines_;             // guarded by mutex_
  bool closed_ = false;                // guarded by mutex_
  bool asked_ = false;                 // likewise
  std::optional<std::string> stacks_;  // likewise
  std::string remark_;                 // likewise
  std::optional<StepSample> sample_;   // likewise
  std::function<void()> on_stacks_;    // likewise, and called with it
  const int signal_;
  const int descriptor_;
};

}  // namespace polyhvd
