// Python's lock, let go of and taken back, also by threads that outlive the interpreter.
//
// When the interpreter ends, Python up to 3.13 ends each other thread that asks for the lock: by
// pthread_exit(), which unwinds the stack through C++ that must not be left in the middle, and
// aborts the process at the first destructor. Here such a thread sleeps instead until the process
// has ended, as Python 3.14 has it do itself.
#pragma once

#include <Python.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "observe/lock_order.h"

namespace polyhvd {

// Runs take(), which waits for the lock; does not return once the interpreter ends.
template <class Take>
void take_gil(Take&& take) noexcept {
  try {
    take();
  } catch (...) {  // the unwinding by pthread_exit(): nothing is thrown there
    for (;;) pause();
  }
}

// As py::gil_scoped_release, which also looks up pybind11's own state each time.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() {
    require_no_lock("Python's lock");
    take_gil([this] { PyEval_RestoreThread(state_); });
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

class WithGil {
 public:
  WithGil() {
    require_no_lock("Python's lock");
    take_gil([this] { state_ = PyGILState_Ensure(); });
  }
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_{};
};

// The end of the program, which all but daemon threads have reached. Operations that these wait for
// fail then; to go on with that they would need frameworks, whose own guards of Python's lock abort
// the process once the interpreter ends.
class EndOfProgram {
 public:
  // This thread ends the program.
  static void begin() noexcept { ender().store(self(), std::memory_order_release); }

  // Holds any other thread up until the process is gone: for long enough, and not for ever, as
  // another thread may wait for it.
  static void hold_others() noexcept {
    const std::uintptr_t thread = ender().load(std::memory_order_acquire);
    if (thread != 0 && thread != self()) std::this_thread::sleep_for(std::chrono::seconds(10));
  }

 private:
  static std::uintptr_t self() noexcept { return static_cast<std::uintptr_t>(pthread_self()); }
  // An atomic, since threads look at it that hold no lock. Zero until the program ends.
  static std::atomic<std::uintptr_t>& ender() noexcept {
    static std::atomic<std::uintptr_t> thread{0};
    return thread;
  }
};

// Whether the interpreter ends. Without the lock it may begin to at any time.
inline bool python_ends() noexcept {
#if PY_VERSION_HEX >= 0x030d0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

}  // namespace polyhvd
