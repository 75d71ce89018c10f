// Outputs of a collective whose sizes the ranks agree on: arrays that are made when these are
// known, before the data moves. The program, which waits for the sizes, takes them; from then on
// MXNet's engine lets reads wait until they are written. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "library.h"
#include "mxnet_c_api.h"

namespace polyhvd::mxnet {

class SizedOutputs {
 public:
  enum class State { kUnknown, kKnown, kFailed };

  // `count`: how many arrays there will be.
  explicit SizedOutputs(std::size_t count) : count_(count) { made_.reserve(count); }

  std::size_t count() const noexcept { return count_; }

  // From the core: see polyhvd_submission.
  void set_rows(const std::int64_t* rows, std::int32_t row_count) {
    std::lock_guard lock(mutex_);
    rows_.assign(rows, rows + row_count);
  }

  // From the core, in order: the memory of a new array, on the device and of the type of `like`.
  void* make(const std::int64_t* dims, std::int32_t ndim, NDArrayHandle like) {
    int dev_type = 0;
    int dev_id = 0;
    int dtype = 0;
    check(g_mx.MXNDArrayGetContext(like, &dev_type, &dev_id));
    check(g_mx.MXNDArrayGetDType(like, &dtype));
    NDArrayHandle array = nullptr;
    check(g_mx.MXNDArrayCreateEx64(dims, ndim, dev_type, dev_id, 0, dtype, &array));
    Array made = Array::owned(array);
    void* data = nullptr;
    check(g_mx.MXNDArrayGetData(array, &data));
    std::lock_guard lock(mutex_);
    made_.push_back(std::move(made));
    if (made_.size() == count_) news_.notify_all();
    return data;
  }

  // The operation is over, or will never run: no more sizes come. Whether the program has taken
  // the arrays, and gets a failure when it reads them.
  bool settle(int code, std::string text) {
    std::lock_guard lock(mutex_);
    code_ = code;
    text_ = std::move(text);
    is_settled_ = true;
    news_.notify_all();
    return is_taken_;
  }

  // After settle(): lets reads of the arrays go on, or fail.
  void release() {
    std::unique_lock lock(mutex_);
    may_release_ = true;
    finish_writing(lock);
  }

  // Waits until the sizes are known, so long at most.
  State await(std::chrono::duration<double> time) {
    std::unique_lock lock(mutex_);
    news_.wait_for(lock, time, [&] { return is_settled_ || made_.size() == count_; });
    if (is_settled_ && code_ != 0) return State::kFailed;
    return made_.size() == count_ ? State::kKnown : State::kUnknown;
  }

  // For the program, once: whether there are arrays to be taken. The caller then pushes an
  // operation that writes them, which is to call write().
  bool take() {
    std::lock_guard lock(mutex_);
    is_taken_ = made_.size() == count_ && !(is_settled_ && code_ != 0);
    return is_taken_;
  }

  // From MXNet: the arrays are this operation's until `on_complete` is called.
  void write(const OnComplete& on_complete) {
    std::unique_lock lock(mutex_);
    on_complete_ = on_complete;
    finish_writing(lock);
  }

  // Known, or taken: none changes any more.
  const std::vector<Array>& arrays() const noexcept { return made_; }
  const std::vector<std::int64_t>& rows() const noexcept { return rows_; }

 private:
  void finish_writing(std::unique_lock<std::mutex>& lock) {
    if (!may_release_ || !on_complete_) return;
    const OnComplete complete = *std::exchange(on_complete_, std::nullopt);
    const std::runtime_error error(text_);
    const bool has_failed = code_ != 0;
    lock.unlock();
    complete.callback(complete.engine, complete.param, has_failed ? &error : nullptr);
  }

  const std::size_t count_;
  std::mutex mutex_;
  std::condition_variable news_;
  // All guarded by mutex_.
  std::vector<std::int64_t> rows_;
  std::vector<Array> made_;
  std::optional<OnComplete> on_complete_;
  int code_ = 0;
  std::string text_;
  bool is_settled_ = false;
  bool may_release_ = false;
  bool is_taken_ = false;
};

}  // namespace polyhvd::mxnet
