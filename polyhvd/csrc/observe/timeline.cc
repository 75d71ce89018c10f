#include "observe/timeline.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "control/error.h"
#include "observe/timeline_writer.h"

namespace polyhvd {
namespace {

constexpr auto kWriteInterval = std::chrono::milliseconds(100);

}  // namespace

Timeline::Timeline(const Recorder& recorder, int rank, Log log)
    : recorder_(recorder), rank_(rank), log_(std::move(log)) {}

Timeline::~Timeline() { stop(); }

void Timeline::start(TimelineOptions options) {
  std::lock_guard control(control_mutex_);
  require_stopped();
  const std::string path = options.path;
  auto writer = std::make_unique<TimelineWriter>(rank_, std::move(options));
  if (!writer->open()) {
    throw Failure(ErrorCode::kInvalidArgument,
                  "the timeline cannot be written to " + path + ": " + std::strerror(errno));
  }
  run_with(std::move(writer));
}

void Timeline::take_over(std::unique_ptr<TimelineWriter> writer, std::string header) {
  std::lock_guard control(control_mutex_);
  require_stopped();
  writer->begin_world(std::move(header), recorder_.scale().ns(ticks_now()));
  run_with(std::move(writer));
}

// Of what control_mutex_ guards.
void Timeline::require_stopped() const {
  if (!thread_.joinable()) return;
  throw Failure(ErrorCode::kInvalidArgument, "a timeline is already being written to " +
                                                 writer_->path() + "; call stop_timeline() first");
}

// control_mutex_ is held.
void Timeline::run_with(std::unique_ptr<TimelineWriter> writer) {
  writer_ = std::move(writer);
  const bool mark_cycles = writer_->marks_cycles();
  {
    std::lock_guard lock(mutex_);
    open_ = true;
    dropped_ = 0;
  }
  thread_ = std::thread([this] { run(); });
  cycles_.store(mark_cycles, std::memory_order_relaxed);
  on_.store(true, std::memory_order_relaxed);
}

bool Timeline::stop() { return hand_over() != nullptr; }

std::unique_ptr<TimelineWriter> Timeline::hand_over() {
  std::lock_guard control(control_mutex_);
  if (!thread_.joinable()) return nullptr;
  on_.store(false, std::memory_order_relaxed);
  cycles_.store(false, std::memory_order_relaxed);
  {
    std::lock_guard lock(mutex_);
    open_ = false;
  }
  wake_.notify_all();
  thread_.join();
  return std::move(writer_);
}

void Timeline::add(const Operation& operation, const Transfer& transfer) {
  Entry entry{{}, transfer};
  if (recorder_.read(operation, entry.record)) push(buffer_, std::move(entry));
}

void Timeline::mark_cycle() {
  if (!cycles_.load(std::memory_order_relaxed)) return;
  Entry entry;
  entry.record.times[kAtSubmit] = ticks_now();
  push(buffer_, std::move(entry));
}

void Timeline::add_data_wait(std::int64_t begin_ns, std::int64_t end_ns) {
  if (on()) push(data_waits_, {begin_ns, end_ns});
}

template <typename T>
void Timeline::push(std::vector<T>& buffer, T entry) {
  std::lock_guard lock(mutex_);
  if (!open_) return;
  if (buffer.size() < kBufferedMax) {
    buffer.push_back(std::move(entry));
  } else {
    ++dropped_;
  }
}

void Timeline::run() {
  std::vector<Entry> entries;
  std::vector<DataWait> data_waits;
  for (bool open = true; open;) {
    std::uint64_t dropped = 0;
    {
      std::unique_lock lock(mutex_);
      wake_.wait_for(lock, kWriteInterval, [this] { return !open_; });
      open = open_;
      entries.swap(buffer_);
      data_waits.swap(data_waits_);
      std::swap(dropped, dropped_);
    }
    const TickScale scale = recorder_.scale();
    writer_->note_dropped(dropped);
    for (const Entry& entry : entries) {
      if (entry.record.sequence == 0) {
        writer_->write_cycle(scale.ns(entry.record.times[kAtSubmit]));
      } else {
        writer_->write_operation(entry.record, entry.transfer, scale);
      }
    }
    for (const DataWait& wait : data_waits) writer_->write_data_wait(wait.begin_ns, wait.end_ns);
    writer_->flush();
    if (const int problem = writer_->take_problem()) {
      log_("the timeline of rank " + std::to_string(rank_) + " ends early: cannot write " +
           writer_->path() + ": " + std::strerror(problem));
    }
    entries.clear();
    data_waits.clear();
  }
}

}  // namespace polyhvd
