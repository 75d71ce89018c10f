// The flight recorder's way to a file: what the ring holds, as lines of JSON, for
// `polyhvd flight` to compare with the other ranks'. Works whatever state the engine
// is in, since it needs none of its locks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include "observe/dump_folder.h"
#include "observe/lock_order.h"
#include "observe/recorder.h"

namespace polyhvd {

class FlightDump {
 public:
  using Log = std::function<void(const std::string&)>;
  // Both logs are called on any thread, also after the end of this. `loss_log` (none: `log`) gets
  // the path of a file that was written because another rank was lost.
  FlightDump(const Recorder& recorder, int rank, DumpPlace place, Log log, Log loss_log);
  ~FlightDump();
  FlightDump(const FlightDump&) = delete;
  FlightDump& operator=(const FlightDump&) = delete;

  // Fields of this rank for the first line, as a JSON object. Any thread.
  void set_header(std::string json);

  // What the ring holds now, for put_down(); empty when nothing is written. Any thread.
  std::string look(std::string_view reason) noexcept;
  // Makes a separate thread write polyhvd-flight.rank<N>.<pid>.json, over an earlier one: whole
  // or not at all. It logs the path the first time, and the error if it cannot. Any thread;
  // the caller waits for no file.
  void put_down(std::string content, bool after_loss = false) noexcept;
  // Both.
  void write(std::string_view reason) noexcept { put_down(look(reason)); }
  // Whether all that was asked for is written, or given up, before `patience` is over. A file
  // system may not answer at all. Any thread.
  bool settle(std::chrono::milliseconds patience) noexcept;
  static constexpr std::chrono::milliseconds kPatience{5000};

  // Writes when an operation waits for other ranks for longer than `limit`; once for
  // each. The driver's.
  void check_stall(std::chrono::duration<double> limit) noexcept;

 private:
  struct Desk;
  std::string text(std::string_view reason) const;

  const Recorder& recorder_;
  const int rank_;
  OrderedMutex<LockRank::flight_header> mutex_;
  std::string header_ = "{}";         // guarded by mutex_
  std::uint64_t stalled_ = 0;         // the driver's: the operation that was last written about
  const std::shared_ptr<Desk> desk_;  // null: nothing is written
};

// Calls back on SIGUSR2, on a separate thread: the program may be in a blocking
// call, and the engine stuck. Does nothing if the program handles the signal.
// All engines of a process share one handler and one thread, since a signal has one handler.
class DumpSignal {
 public:
  explicit DumpSignal(std::function<void()> on_signal);
  ~DumpSignal();  // the last one of the process restores the default
  DumpSignal(const DumpSignal&) = delete;
  DumpSignal& operator=(const DumpSignal&) = delete;

  // In a forked child, instead of the destructor: the thread does not exist there.
  static void forget() noexcept;

  // On the thread that serves the signal.
  void call() const { on_signal_(); }

 private:
  const std::function<void()> on_signal_;
};

}  // namespace polyhvd
