#include "observe/flight.h"

#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "observe/json.h"
#include "observe/lock_order.h"

namespace polyhvd {
namespace {

void append(std::string& out, const Record& r, const TickScale& scale) {
  constexpr std::array<std::string_view, kMoments> kTimes = {"submitted_ns", "announced_ns",
                                                             "agreed_ns", "started_ns", "ended_ns"};
  out += '{';
  json::append_field(out, "sequence", r.sequence);
  json::append_field(out, "state", name_of(r.state));
  json::append_field(out, "kind", name_of(r.kind));
  json::append_field(out, "name", r.name.view());
  json::append_field(out, "process_set", r.process_set);
  json::append_field(out, "dtype", name_of(r.dtype));
  json::append_field(out, "bytes", r.bytes);
  if (r.batch != 0) {
    json::append_field(out, "batch", r.batch);
    json::append_field(out, "fused", r.fused);
    json::append_field(out, "cache_id", r.cache_id);
  }
  for (std::size_t i = 0; i < kMoments; ++i) {
    if (r.times[i] != 0) json::append_field(out, kTimes[i], scale.ns(r.times[i]));
  }
  out += "}\n";
}

}  // namespace

void FlightDump::set_header(std::string json) {
  std::lock_guard lock(mutex_);
  header_ = std::move(json);
}

std::string FlightDump::text(std::string_view reason) const {
  const TickScale scale = recorder_.scale();
  const std::vector<Record> records = recorder_.snapshot();
  std::string out = "{\"flight\":" + header_ + ",\"reason\":";
  json::append_string(out, reason);
  json::append_field(out, "rank", rank_);
  json::append_field(out, "pid", getpid());
  json::append_field(out, "now_ns", steady_ns());
  json::append_field(out, "unix_s", time(nullptr));
  json::append_field(out, "records", records.size());
  out += "}\n";
  for (const Record& record : records) append(out, record, scale);
  return out;
}

// Writing, on a separate thread -----------------------------------------------------

// What FlightDump and its thread share. The thread may outlive the engine: a file system that
// does not answer is not waited for.
struct FlightDump::Desk {
  Desk(int rank_, DumpPlace place_, Log log_, Log loss_log_)
      : rank(rank_),
        place(std::move(place_)),
        log(std::move(log_)),
        loss_log(loss_log_ ? std::move(loss_log_) : log) {}

  void run() noexcept;
  void put_down(const std::string& text, bool after_loss);

  const int rank;
  const DumpPlace place;
  const Log log;
  const Log loss_log;
  OrderedMutex<LockRank::flight_desk> mutex;
  OrderedCondition news;
  std::optional<std::string> text;  // to be written; guarded by mutex
  bool after_loss = false;          // of `text`; likewise
  bool running = false;             // likewise: there is a thread, which ends when it has no text
  bool reported = false;            // the thread's
  bool swept = false;               // likewise
};

void FlightDump::Desk::run() noexcept {
  for (;;) {
    std::string next;
    bool next_after_loss = false;
    {
      std::lock_guard lock(mutex);
      if (!text) {
        running = false;
        news.notify_all();
        return;
      }
      next = std::move(*text);
      next_after_loss = after_loss;
      text.reset();
    }
    try {
      put_down(next, next_after_loss);
    } catch (const std::exception&) {
      // No memory: the dump is given up, not the job.
    }
  }
}

void FlightDump::Desk::put_down(const std::string& content, bool is_loss) {
  const std::string name = "rank " + std::to_string(rank);
  const DumpFolder folder(place);
  std::string path;
  if (folder) {
    path = folder.write(
        "polyhvd-flight.rank" + std::to_string(rank) + "." + std::to_string(getpid()) + ".json",
        content);
  }
  const std::string why = path.empty() ? std::strerror(errno) : "";
  if (!std::exchange(reported, true)) {
    if (path.empty()) {
      log(name + ": cannot write the last operations to a file in " + place.root + ": " + why +
          "; set POLYHVD_FLIGHT_DIR to another folder");
    } else {
      (is_loss ? loss_log : log)(name + ": the last operations are in " + path +
                                 "; `polyhvd flight` compares the ranks' files");
    }
  }
  if (folder && !std::exchange(swept, true)) folder.sweep();
}

FlightDump::FlightDump(const Recorder& recorder, int rank, DumpPlace place, Log log, Log loss_log)
    : recorder_(recorder),
      rank_(rank),
      desk_(place.root.empty() ? nullptr
                               : std::make_shared<Desk>(rank, std::move(place), std::move(log),
                                                        std::move(loss_log))) {}

FlightDump::~FlightDump() { settle(kPatience); }

std::string FlightDump::look(std::string_view reason) noexcept try {
  if (!desk_) return "";
  std::lock_guard lock(mutex_);
  return text(reason);
} catch (const std::exception&) {
  return "";  // no memory: the dump is given up, not the job
}

void FlightDump::put_down(std::string content, bool after_loss) noexcept try {
  if (!desk_ || content.empty()) return;
  std::lock_guard lock(desk_->mutex);
  desk_->text = std::move(content);
  desk_->after_loss = after_loss;
  if (desk_->running) return;
  std::thread([desk = desk_] { desk->run(); }).detach();
  desk_->running = true;  // before it can look, which takes the lock
} catch (const std::exception&) {
  // No thread: likewise.
}

bool FlightDump::settle(std::chrono::milliseconds patience) noexcept {
  if (!desk_) return true;
  std::unique_lock lock(desk_->mutex);
  return desk_->news.wait_for(lock, patience, [this] { return !desk_->running; });
}

void FlightDump::check_stall(std::chrono::duration<double> limit) noexcept {
  if (!desk_) return;
  const TickScale scale = recorder_.scale();
  const auto ticks = static_cast<Ticks>(limit.count() * 1e9 / scale.ns_per_tick());
  const Ticks now = ticks_now();
  if (now < ticks) return;  // the clock counts from the start of the machine
  const std::uint64_t sequence = recorder_.waiting_since(now - ticks);
  if (sequence == 0 || sequence == stalled_) return;
  stalled_ = sequence;
  write("an operation waits for other ranks");
}

// The signal --------------------------------------------------------------------

namespace {

// A handler has no argument, so this belongs to the process: an eventfd that
// the handler writes and the thread reads. Made once and never closed, as a handler
// may still be running. Atomic since handlers run on any thread.
std::atomic<int> g_signalled_fd{-1};
static_assert(std::atomic<int>::is_always_lock_free);  // or a handler may not touch it

void on_dump_signal(int) {
  const int saved = errno;
  const std::uint64_t one = 1;
  (void)!write(g_signalled_fd.load(), &one, sizeof one);
  errno = saved;
}

void restore_default() noexcept {
  struct sigaction current = {};
  if (sigaction(SIGUSR2, nullptr, &current) != 0 || current.sa_handler != &on_dump_signal) return;
  signal(SIGUSR2, SIG_DFL);
}

// The process has one handler, and one thread that serves it, for all of its engines.
// Never destroyed, since a program may end while an engine runs.
struct SignalServer {
  OrderedMutex<LockRank::signal_changes>
      changing;  // held while an engine comes or goes; taken before `mutex`
  OrderedMutex<LockRank::signal_listeners> mutex;  // of the listeners; held while they are called
  std::vector<DumpSignal*> listeners;
  std::thread thread;  // runs while there are any; under `changing`
  std::atomic<bool> stopping{false};

  void run() {
    while (!stopping.load()) {
      std::uint64_t count = 0;
      if (read(g_signalled_fd.load(), &count, sizeof count) < 0 && errno != EINTR) return;
      if (stopping.load() || count == 0) continue;
      std::lock_guard lock(mutex);
      for (DumpSignal* listener : listeners) listener->call();
    }
  }

  // Whether the signal was free, and is ours now.
  bool start() {
    struct sigaction current = {};
    if (sigaction(SIGUSR2, nullptr, &current) != 0) return false;
    if ((current.sa_flags & SA_SIGINFO) != 0 || current.sa_handler != SIG_DFL) return false;
    if (g_signalled_fd.load() < 0) g_signalled_fd.store(eventfd(0, EFD_CLOEXEC));
    if (g_signalled_fd.load() < 0) return false;
    struct sigaction action = {};
    action.sa_handler = &on_dump_signal;
    action.sa_flags = SA_RESTART | SA_ONSTACK;
    if (sigaction(SIGUSR2, &action, nullptr) != 0) return false;
    stopping.store(false);
    thread = std::thread([this] { run(); });
    return true;
  }

  void stop() {
    restore_default();
    stopping.store(true);
    const std::uint64_t one = 1;
    (void)!write(g_signalled_fd.load(), &one, sizeof one);
    thread.join();
    // The thread may have left without reading that: it is not a signal for the next one.
    pollfd unread{g_signalled_fd.load(), POLLIN, 0};
    std::uint64_t count = 0;
    if (poll(&unread, 1, 0) > 0) (void)!read(unread.fd, &count, sizeof count);
  }
};

// Replaced in a forked child, where the thread does not exist and locks may be held for ever.
SignalServer* g_server = new SignalServer;

}  // namespace

DumpSignal::DumpSignal(std::function<void()> on_signal) : on_signal_(std::move(on_signal)) {
  SignalServer& server = *g_server;
  std::lock_guard changing(server.changing);
  if (server.listeners.empty() && !server.start()) return;
  std::lock_guard lock(server.mutex);
  server.listeners.push_back(this);
}

DumpSignal::~DumpSignal() {
  SignalServer& server = *g_server;
  std::lock_guard changing(server.changing);
  {
    std::lock_guard lock(server.mutex);
    if (std::erase(server.listeners, this) == 0 || !server.listeners.empty()) return;
  }
  server.stop();
}

void DumpSignal::forget() noexcept {
  restore_default();
  const int inherited = g_signalled_fd.exchange(-1);  // the parent's thread reads it
  if (inherited >= 0) close(inherited);
  g_server = new SignalServer;
}

}  // namespace polyhvd
