// What the engine's threads leave for a thread of the program's language to do.
// They never call into it themselves: they would wait for its lock, and may not
// touch it at all while it ends. Thread-safe; no call of the engine's blocks.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

namespace polyhvd {

class Mailbox {
 public:
  // The engine's side. A line that is not taken within a second is written to
  // standard error by a later tick(): the program's lock may be held for long.
  void log(std::string text);
  void tick();

  // The program's side. Blocks until there is something to take; false once closed
  // and empty. Called without the program's lock, take_line() with it: what nobody
  // can take yet stays here.
  bool wait();
  std::optional<std::string> take_line();
  // From now on lines are written to standard error at once.
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  struct Line {
    std::string text;
    Clock::time_point since;
  };

  std::mutex mutex_;
  std::condition_variable news_;
  std::deque<Line> lines_;  // guarded by mutex_
  bool closed_ = false;     // guarded by mutex_
};

}  // namespace polyhvd
