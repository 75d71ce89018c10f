#include "mailbox.h"

#include <cstdio>

namespace polyhvd {
namespace {

constexpr auto kPatience = std::chrono::seconds(1);

void write_to_stderr(const std::string& text) {
  const std::string line = "polyhvd: " + text + "\n";
  (void)!fwrite(line.data(), 1, line.size(), stderr);
}

}  // namespace

void Mailbox::log(std::string text) {
  {
    std::lock_guard lock(mutex_);
    if (!closed_) {
      lines_.push_back({std::move(text), Clock::now()});
      news_.notify_one();
      return;
    }
  }
  write_to_stderr(text);
}

void Mailbox::tick() {
  std::deque<Line> overdue;
  {
    std::lock_guard lock(mutex_);
    if (lines_.empty() || Clock::now() - lines_.front().since < kPatience) return;
    overdue.swap(lines_);
  }
  for (const Line& line : overdue) write_to_stderr(line.text);
}

bool Mailbox::wait() {
  std::unique_lock lock(mutex_);
  news_.wait(lock, [this] { return closed_ || !lines_.empty(); });
  return !lines_.empty();
}

std::optional<std::string> Mailbox::take_line() {
  std::lock_guard lock(mutex_);
  if (lines_.empty()) return std::nullopt;
  std::string text = std::move(lines_.front().text);
  lines_.pop_front();
  return text;
}

void Mailbox::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  news_.notify_all();
}

}  // namespace polyhvd
