// The flight recorder's way to a file: what the ring holds, as lines of JSON, for
// `polyhvd flight` to compare with the other ranks'. Works whatever state the engine
// is in, since it needs none of its locks.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "recorder.h"

namespace polyhvd {

class FlightDump {
 public:
  using Log = std::function<void(const std::string&)>;
  // `folder` is empty to write nothing. `log` is called on any thread.
  FlightDump(const Recorder& recorder, int rank, std::string folder, Log log)
      : recorder_(recorder), rank_(rank), folder_(std::move(folder)), log_(std::move(log)) {}

  // Fields of this rank for the first line, as a JSON object. Any thread.
  void set_header(std::string json);

  // Writes polyhvd-flight.rank<N>.<pid>.json, over an earlier one: whole or not at
  // all. Says where on the first time, and what is wrong when it cannot. Any thread.
  void write(std::string_view reason) noexcept;

  // Writes when an operation waits for other ranks for longer than `limit`; once for
  // each. The driver's.
  void check_stall(std::chrono::duration<double> limit) noexcept;

 private:
  std::string text(std::string_view reason) const;

  const Recorder& recorder_;
  const int rank_;
  const std::string folder_;
  const Log log_;
  std::mutex mutex_;
  std::string header_ = "{}";  // guarded by mutex_
  bool said_ = false;          // guarded by mutex_
  std::uint64_t stalled_ = 0;  // the driver's: the operation that was last written about
};

// Calls back on SIGUSR2, on a thread of its own: the program may be in a blocking
// call, and the engine stuck. Does nothing where somebody else handles the signal.
// One at a time in a process, since a signal has one handler.
class DumpSignal {
 public:
  explicit DumpSignal(std::function<void()> on_signal);
  ~DumpSignal();  // restores the default
  DumpSignal(const DumpSignal&) = delete;
  DumpSignal& operator=(const DumpSignal&) = delete;

  // In a forked child, instead of the destructor: the thread does not exist there.
  static void forget() noexcept;

 private:
  void run();

  const std::function<void()> on_signal_;
  bool installed_ = false;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace polyhvd
