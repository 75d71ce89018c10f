// Python's lock, let go of and taken back, also by threads that outlive the interpreter.
//
// When the interpreter ends, Python up to 3.13 ends each other thread that asks for the lock: by
// pthread_exit(), which unwinds the stack through C++ that must not be left in the middle, and
// aborts the process at the first destructor. Here such a thread sleeps instead until the process
// has ended, as Python 3.14 has it do itself.
#pragma once

#include <Python.h>
#include <unistd.h>

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
    take_gil([this] { state_ = PyGILState_Ensure(); });
  }
  ~WithGil() { PyGILState_Release(state_); }
  WithGil(const WithGil&) = delete;
  WithGil& operator=(const WithGil&) = delete;

 private:
  PyGILState_STATE state_{};
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
