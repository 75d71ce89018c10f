#include "flight.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "json.h"

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

bool write_all(int fd, std::string_view text) noexcept {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

bool write_file(const std::string& path, std::string_view text) noexcept {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0644);
  if (fd < 0) return false;
  const bool written = write_all(fd, text);
  return close(fd) == 0 && written;
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

void FlightDump::write(std::string_view reason) noexcept try {
  if (folder_.empty()) return;
  std::lock_guard lock(mutex_);
  const std::string path = folder_ + "/polyhvd-flight.rank" + std::to_string(rank_) + "." +
                           std::to_string(getpid()) + ".json";
  const std::string draft = path + ".new";
  if (!write_file(draft, text(reason)) || std::rename(draft.c_str(), path.c_str()) != 0) {
    const std::string why = std::strerror(errno);
    unlink(draft.c_str());
    if (!said_) log_("rank " + std::to_string(rank_) + ": cannot write " + path + ": " + why);
  } else if (!said_) {
    log_("rank " + std::to_string(rank_) + ": the last operations are in " + path +
         "; `polyhvd flight` compares the ranks' files");
  }
  said_ = true;
} catch (const std::exception&) {
  // No memory: the dump is given up, not the job.
}

void FlightDump::check_stall(std::chrono::duration<double> limit) noexcept {
  if (folder_.empty()) return;
  const TickScale scale = recorder_.scale();
  const auto ticks = static_cast<Ticks>(limit.count() * 1e9 / scale.ns_per_tick());
  const std::uint64_t sequence = recorder_.waiting_since(ticks_now() - ticks);
  if (sequence == 0 || sequence == stalled_) return;
  stalled_ = sequence;
  write("an operation waits for other ranks");
}

// The signal --------------------------------------------------------------------

namespace {

// A handler has no argument to be told by, so this is the process's: an eventfd that
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

}  // namespace

DumpSignal::DumpSignal(std::function<void()> on_signal) : on_signal_(std::move(on_signal)) {
  struct sigaction current = {};
  if (sigaction(SIGUSR2, nullptr, &current) != 0) return;
  if ((current.sa_flags & SA_SIGINFO) != 0 || current.sa_handler != SIG_DFL) return;
  if (g_signalled_fd.load() < 0) g_signalled_fd.store(eventfd(0, EFD_CLOEXEC));
  if (g_signalled_fd.load() < 0) return;
  thread_ = std::thread([this] { run(); });
  struct sigaction action = {};
  action.sa_handler = &on_dump_signal;
  action.sa_flags = SA_RESTART | SA_ONSTACK;
  installed_ = sigaction(SIGUSR2, &action, nullptr) == 0;
}

DumpSignal::~DumpSignal() {
  if (installed_) restore_default();
  if (!thread_.joinable()) return;
  stopping_.store(true);
  const std::uint64_t one = 1;
  (void)!write(g_signalled_fd.load(), &one, sizeof one);
  thread_.join();
  // The thread may have left without reading that: it is no signal for the next one.
  pollfd unread{g_signalled_fd.load(), POLLIN, 0};
  std::uint64_t count = 0;
  if (poll(&unread, 1, 0) > 0) (void)!read(unread.fd, &count, sizeof count);
}

void DumpSignal::forget() noexcept {
  restore_default();
  const int inherited = g_signalled_fd.exchange(-1);  // the parent's thread reads it
  if (inherited >= 0) close(inherited);
}

void DumpSignal::run() {
  while (!stopping_.load()) {
    std::uint64_t count = 0;
    if (read(g_signalled_fd.load(), &count, sizeof count) < 0 && errno != EINTR) return;
    if (!stopping_.load() && count > 0) on_signal_();
  }
}

}  // namespace polyhvd
