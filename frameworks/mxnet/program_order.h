// Lets operations of one name pass in the order in which the program asked for
// them. MXNet's engine runs them as their arrays become ready, which may be in
// another order on each rank; then the wrong ones would meet. Thread-safe.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace polyhvd {

// Item: movable and default-constructible.
template <class Item>
class ProgramOrder {
 public:
  using Ticket = std::uint64_t;

  // A place in the line of `name`. Every ticket must arrive in the end.
  Ticket take(const std::string& name) {
    std::lock_guard lock(mutex_);
    return lines_[name].taken++;
  }

  // Calls pass(item) for this ticket, and for those that waited for it, once all
  // earlier ones have passed: now, or later on the thread that closes the gap.
  // No lock is held meanwhile.
  template <class Pass>
  void arrive(const std::string& name, Ticket ticket, Item item, Pass&& pass) {
    std::unique_lock lock(mutex_);
    Line& line = lines_.at(name);
    if (line.moving || ticket != line.passed) {
      line.arrived.emplace(ticket, std::move(item));
      return;  // the thread that moves the line, or closes the gap, sees it
    }
    line.moving = true;  // keeps the line alive
    ++line.passed;
    lock.unlock();
    pass(item);
    lock.lock();
    for (auto first = line.arrived.find(line.passed); first != line.arrived.end();
         first = line.arrived.find(line.passed)) {
      Item next = std::move(first->second);
      line.arrived.erase(first);
      ++line.passed;
      lock.unlock();
      pass(next);
      lock.lock();
    }
    line.moving = false;
    if (line.passed == line.taken) lines_.erase(name);
  }

 private:
  struct Line {
    Ticket taken = 0;
    Ticket passed = 0;
    bool moving = false;
    std::map<Ticket, Item> arrived;
  };
  std::mutex mutex_;
  std::unordered_map<std::string, Line> lines_;  // guarded by mutex_; only those in use
};

}  // namespace polyhvd
