#include "mpi/blocking_calls.h"

#include <exception>
#include <thread>
#include <utility>

namespace polyhvd::mpi {

void BlockingCall::run() noexcept {
  try {
    call_();
  } catch (const Failure& failure) {
    error_ = failure.error();
  } catch (const std::exception& error) {
    error_ = Error{ErrorCode::kInternal, error.what()};
  }
  std::lock_guard lock(mutex_);
  finished_.store(true);
  returned_.notify_all();
}

bool BlockingCall::wait_for(std::chrono::nanoseconds time) const {
  std::unique_lock lock(mutex_);
  return returned_.wait_for(lock, time, [this] { return is_finished(); });
}

struct BlockingCalls::Queue {
  OrderedMutex<LockRank::mpi_calls> mutex;
  OrderedCondition filled;
  bool has_thread = false;
  std::shared_ptr<BlockingCall> next;
  std::shared_ptr<BlockingCall> last;  // that was begun

  void serve() {
    for (;;) {
      std::unique_lock lock(mutex);
      filled.wait(lock, [this] { return next != nullptr; });
      const auto call = std::exchange(next, nullptr);
      lock.unlock();
      call->run();
    }
  }
};

BlockingCalls::BlockingCalls() : queue_(std::make_shared<Queue>()) {}

std::shared_ptr<BlockingCall> BlockingCalls::begin(std::string name, std::function<void()> call) {
  Queue& queue = *queue_;
  std::lock_guard lock(queue.mutex);
  if (queue.last && !queue.last->is_finished()) {
    throw Failure(ErrorCode::kPeerLost, "this process is still waiting in " + queue.last->name() +
                                            " for other ranks, and can no longer use MPI");
  }
  if (!queue.has_thread) {
    std::thread([shared = queue_] { shared->serve(); }).detach();
    queue.has_thread = true;
  }
  queue.last = queue.next = std::make_shared<BlockingCall>(std::move(name), std::move(call));
  queue.filled.notify_one();
  return queue.last;
}

}  // namespace polyhvd::mpi
