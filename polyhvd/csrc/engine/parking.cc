#include "engine/parking.h"

#include <poll.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace polyhvd {
namespace {

constexpr std::chrono::milliseconds kSleep(100);      // between looks at liveness
constexpr std::chrono::milliseconds kLightSleep(10);  // after which sent_ is looked at soon enough
// A sleep may add this fraction to the time for which another rank waits for this one.
constexpr int kLightness = 8;

}  // namespace

Parking::Parking() : wake_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
  if (wake_fd_ < 0) {
    throw Failure(ErrorCode::kInternal, std::string("eventfd: ") + std::strerror(errno));
  }
}

Parking::~Parking() { close(wake_fd_); }

void Parking::watch(int fd, short events, std::function<void(short)> on_ready) {
  std::lock_guard lock(watched_mutex_);
  watched_.push_back({fd, events, events, std::move(on_ready)});
}

void Parking::unwatch(int fd) {
  std::lock_guard lock(watched_mutex_);
  std::erase_if(watched_, [fd](const Watched& w) { return w.fd == fd; });
}

void Parking::unwatch_all() {
  std::lock_guard lock(watched_mutex_);
  watched_.clear();
}

void Parking::set_events(int fd, short events) {
  std::lock_guard lock(watched_mutex_);
  for (Watched& w : watched_) {
    if (w.fd == fd) w.events = events == 0 ? w.idle_events : events;
  }
}

void Parking::wake() noexcept {
  const std::uint64_t one = 1;
  (void)!write(wake_fd_, &one, sizeof one);
}

void Parking::drain_wake_fd() noexcept {
  std::uint64_t count = 0;
  (void)!read(wake_fd_, &count, sizeof count);
}

bool Parking::poll_watched(int timeout_ms) {
  std::vector<pollfd> fds;
  {
    std::lock_guard lock(watched_mutex_);
    fds.reserve(watched_.size() + 1);
    for (const Watched& w : watched_) fds.push_back({w.fd, w.events, 0});
  }
  fds.push_back({wake_fd_, POLLIN, 0});
  const int count = poll(fds.data(), fds.size(), timeout_ms);
  if (count <= 0) return false;
  if (fds.back().revents != 0) drain_wake_fd();
  fds.pop_back();
  for (const pollfd& p : fds) {
    if (p.revents == 0) continue;
    std::function<void(short)> on_ready;
    {
      std::lock_guard lock(watched_mutex_);
      const auto it = std::ranges::find(watched_, p.fd, &Watched::fd);
      if (it != watched_.end()) on_ready = it->on_ready;
    }
    if (on_ready) on_ready(p.revents);
  }
  return true;
}

void Parking::await_slowly(const std::function<bool()>& ready, Clock::time_point deadline) {
  for (int i = 0; i < kYields; ++i) {
    if (ready()) {
      note_move();
      return;
    }
    if (i % kYieldsPerCheck == kYieldsPerCheck - 1) on_slow_();
    sched_yield();
  }
  struct Asleep {  // announces the sleeper to threads of this rank
    Parking& p;
    explicit Asleep(Parking& parking) : p(parking) { p.announce_sleep(); }
    ~Asleep() {
      p.sleep_flag_->store(kAwake);
      p.end_sleep();
    }
  } asleep(*this);
  for (;;) {
    // The flag is set before the last check: a rank that publishes after it wakes us.
    sleep_flag_->store(kWaiting);
    if (ready()) {
      note_move();
      return;
    }
    on_slow_();
    // A transfer may have slept and woken up by itself; a rank that is awake is not woken.
    if (sleep_flag_->load() != kWaiting) continue;
    const auto now = Clock::now();
    if (now >= deadline) {
      throw Failure(ErrorCode::kTimeout, "the transfer did not finish in time");
    }
    auto timeout = asking_ ? std::chrono::milliseconds(0) : sleep_max(kSleep);
    if (deadline != kForever) {
      timeout = std::min(timeout, std::chrono::ceil<std::chrono::milliseconds>(deadline - now));
    }
    poll_watched(static_cast<int>(timeout.count()));
  }
}

void Parking::doze(std::chrono::milliseconds timeout) {
  std::vector<pollfd> fds;
  {
    std::lock_guard lock(watched_mutex_);
    fds.reserve(watched_.size() + 1);
    for (const Watched& w : watched_) fds.push_back({w.fd, w.idle_events, 0});
  }
  fds.push_back({wake_fd_, POLLIN, 0});
  timeout = sleep_max(timeout);
  deeply_asleep_.store(timeout > kLightSleep);
  // Who has sent in between has seen one of both.
  timeout = sleep_max(timeout);
  poll(fds.data(), fds.size(), static_cast<int>(timeout.count()));
  deeply_asleep_.store(false);
}

std::chrono::milliseconds Parking::sleep_max(std::chrono::milliseconds most) const noexcept {
  const Clock::rep sent = sent_.load();
  if (sent == 0) return most;
  const auto ago = Clock::now() - Clock::time_point(Clock::duration(sent));
  const auto part = std::chrono::floor<std::chrono::milliseconds>(ago / kLightness);
  return std::clamp(part, std::chrono::milliseconds(1), most);
}

}  // namespace polyhvd
