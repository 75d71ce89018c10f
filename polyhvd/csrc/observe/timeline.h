// A trace of this rank's operations in a file, in the trace-event format of Chrome
// and Perfetto. On and off at run time; off it costs one load per operation.
//
// The driver puts finished operations into a bounded buffer, and a thread of the
// timeline's own formats and writes them. The file is bounded, too: at half of the
// limit it becomes "<path>.old" (before the suffix), over an earlier one, and a new
// file is begun, so that the newest events are kept. Each file is a trace by itself,
// also when the process was killed. A process that goes on in another world, with
// another engine, takes its file along.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "observe/lock_order.h"
#include "observe/recorder.h"

namespace polyhvd {

// Of one batch: when its communicator was called, and for how long it waited there
// for the bytes of others. Zero: it moved none.
struct Transfer {
  Ticks begin = 0;
  Ticks end = 0;
  Ticks waited = 0;
};

struct TimelineOptions {
  std::string path;
  bool mark_cycles = false;
  std::uint64_t bytes_max = std::uint64_t{256} << 20;
  std::string header = "{}";  // fields of this rank, as a JSON object
};

class TimelineWriter;

class Timeline {
 public:
  using Log = std::function<void(const std::string&)>;
  // `log` is called on the timeline's thread.
  Timeline(const Recorder& recorder, int rank, Log log);
  ~Timeline();  // stops

  // Any thread. Throws Failure(kInvalidArgument) when it runs already or the file
  // cannot be opened.
  void start(TimelineOptions options);
  // Any thread. Writes what is left, and returns when the file is closed; false when
  // no timeline was running.
  bool stop();
  // As stop(), but the file stays open, for take_over() of the next engine of this process;
  // null when no timeline was running.
  std::unique_ptr<TimelineWriter> hand_over();
  // As start(), with the file that another engine has handed over. `header` is this one's.
  void take_over(std::unique_ptr<TimelineWriter> writer, std::string header);

  bool on() const noexcept { return on_.load(std::memory_order_relaxed); }

  // The driver's; call them when on().
  void add(const Operation& operation, const Transfer& transfer);
  void mark_cycle();

  // Any thread. The program has waited for its data, in nanoseconds of steady_ns().
  void add_data_wait(std::int64_t begin_ns, std::int64_t end_ns);

  // What the buffer holds at most; beyond it the newest events are dropped and counted.
  static constexpr std::size_t kBufferedMax = std::size_t{1} << 16;

 private:
  struct Entry {
    Record record;  // without a sequence: the start of a cycle, at kAtSubmit
    Transfer transfer;
  };

  struct DataWait {
    std::int64_t begin_ns = 0;
    std::int64_t end_ns = 0;
  };

  void require_stopped() const;
  void run_with(std::unique_ptr<TimelineWriter> writer);
  template <typename T>
  void push(std::vector<T>& buffer, T entry);
  void run();

  const Recorder& recorder_;
  const int rank_;
  const Log log_;
  std::atomic<bool> on_{false};      // a hint to the driver; push() looks again
  std::atomic<bool> cycles_{false};  // likewise
  OrderedMutex<LockRank::timeline_control>
      control_mutex_;                       // held by start() and stop(), around mutex_
  std::unique_ptr<TimelineWriter> writer_;  // the thread's while it runs, else control_mutex_'s
  std::thread thread_;                      // guarded by control_mutex_

  OrderedMutex<LockRank::timeline> mutex_;
  OrderedCondition wake_;
  // Guarded by mutex_.
  bool open_ = false;
  std::vector<Entry> buffer_;
  std::vector<DataWait> data_waits_;
  std::uint64_t dropped_ = 0;
};

}  // namespace polyhvd
