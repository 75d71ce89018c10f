#include "observe/mailbox.h"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <utility>

namespace polyhvd {
namespace {

constexpr auto kPatience = std::chrono::seconds(1);
constexpr std::size_t kDumpBytesMax = 64 << 10;

void write_to_stderr(const std::string& text) {
  const std::string line = "polyhvd: " + text + "\n";
  (void)!fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace

void Mailbox::log(std::string text, bool is_debug) {
  {
    std::lock_guard lock(mutex_);
    if (!closed_) {
      lines_.push_back({std::move(text), is_debug, Clock::now()});
      news_.notify_one();
      return;
    }
  }
  if (!is_debug) write_to_stderr(text);
}

void Mailbox::tick() {
  std::deque<Line> overdue;
  {
    std::lock_guard lock(mutex_);
    if (lines_.empty() || Clock::now() - lines_.front().since < kPatience) return;
    overdue.swap(lines_);
  }
  for (const Line& line : overdue) {
    if (!line.is_debug) write_to_stderr(line.text);
  }
}

bool Mailbox::wait() {
  std::unique_lock lock(mutex_);
  news_.wait(lock, [this] { return closed_ || asked_ || sample_ || !lines_.empty(); });
  return !closed_ || !lines_.empty();
}

std::optional<Mailbox::Line> Mailbox::take_line() {
  std::lock_guard lock(mutex_);
  if (lines_.empty()) return std::nullopt;
  Line line = std::move(lines_.front());
  lines_.pop_front();
  return line;
}

void Mailbox::post(const StepSample& sample) {
  std::lock_guard lock(mutex_);
  sample_ = sample;
  news_.notify_one();
}

std::optional<StepSample> Mailbox::take_sample() {
  std::lock_guard lock(mutex_);
  return std::exchange(sample_, std::nullopt);
}

void Mailbox::ask_stacks() {
  std::lock_guard lock(mutex_);
  stacks_.reset();
  asked_ = true;
  news_.notify_one();
}

bool Mailbox::take_question() {
  std::lock_guard lock(mutex_);
  return std::exchange(asked_, false);
}

void Mailbox::answer(std::string stacks) {
  std::lock_guard lock(mutex_);
  stacks_ = std::move(stacks);
  if (on_stacks_) on_stacks_();
}

std::optional<std::string> Mailbox::take_stacks() {
  std::lock_guard lock(mutex_);
  return std::exchange(stacks_, std::nullopt);
}

void Mailbox::set_on_stacks(std::function<void()> on_stacks) {
  std::lock_guard lock(mutex_);
  on_stacks_ = std::move(on_stacks);
}

std::string Mailbox::dump_stacks() const {
  if (signal_ == 0 || ftruncate(descriptor_, 0) != 0 || lseek(descriptor_, 0, SEEK_SET) != 0) {
    return "";
  }
  pthread_kill(pthread_self(), signal_);  // handled before this returns
  std::string text(kDumpBytesMax, '\0');
  const ssize_t bytes = pread(descriptor_, text.data(), text.size(), 0);
  text.resize(bytes > 0 ? static_cast<std::size_t>(bytes) : 0);
  return text;
}

void Mailbox::remark(std::string text) {
  std::lock_guard lock(mutex_);
  remark_ = std::move(text);
}

std::string Mailbox::remarked() {
  std::lock_guard lock(mutex_);
  return remark_;
}

void Mailbox::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  news_.notify_all();
}

}  // namespace polyhvd
