// The order in which a thread takes locks, for all mutexes of the core and of the backends. Two
// threads that keep to one order cannot wait for each other.
//
// Checked where POLYHVD_CHECK_LOCK_ORDER is defined: a thread that breaks it ends the process, with
// the names of both locks, whether or not anybody waits. Elsewhere an OrderedMutex is a std::mutex.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace polyhvd {

// A thread that holds a lock takes only such as stand below it here, and never one of the same
// line, or the same one again. Python's own lock comes before all: a thread that holds one of these
// never waits for it (see require_no_lock). Done callbacks run with none of them but `shutdown`.
#define POLYHVD_LOCK_ORDER(LOCK)                                                                 \
  LOCK(shutdown)         /* Engine: held from begin to end of a shutdown, which does all else */ \
  LOCK(timeline_control) /* Timeline: start and stop, around the thread that takes `timeline` */ \
  LOCK(signal_changes)   /* DumpSignal: an engine comes or goes, around `signal_listeners` */    \
  LOCK(signal_listeners) /* DumpSignal: held while engines write their flight dumps */           \
  LOCK(flight_header)    /* FlightDump: while the ring is written down as text */                \
  LOCK(flight_desk)      /* FlightDump: the text that its thread puts into a file */             \
  LOCK(transport)        /* ConnectedRank: closes connections under it, and takes those below */ \
  LOCK(tuning)           /* Tuner: two values are copied */                                      \
  LOCK(mailbox)          /* Mailbox: lines, samples, stacks; wakes the driver with it */         \
  LOCK(queue)            /* OpQueue: drops operations under it, and with them device events */   \
  LOCK(turn)             /* DriverRole: for the condition variable of those who wait */          \
  LOCK(timeline)         /* Timeline: entries for its thread */                                  \
  LOCK(watched)          /* Parking: descriptors and their callbacks, which run without it */    \
  LOCK(mpi_calls)        /* BlockingCalls: the next call; drops the last one under it */         \
  LOCK(mpi_call)         /* BlockingCall: for the condition variable of its end */               \
  LOCK(arrivals)         /* Executor: the ends of what devices may still do */                   \
  LOCK(gpu_devices)      /* gpu::Devices: opens the context, and so loads the driver */          \
  LOCK(gpu_driver)       /* gpu::Driver: while the library is loaded */                          \
  LOCK(gpu_events)       /* gpu::Context: the events that are free */                            \
  LOCK(nccl_kept)        /* FusionBuffer: memory that is kept for good */

enum class LockRank : std::uint8_t {
#define POLYHVD_LOCK(name) name,
  POLYHVD_LOCK_ORDER(POLYHVD_LOCK)
#undef POLYHVD_LOCK
};
const char* name_of(LockRank rank) noexcept;

// A mutex that knows its place. For std::lock_guard, std::unique_lock and
// std::condition_variable_any, whose waits take it back in order, too.
class CheckedMutex {
 public:
  explicit CheckedMutex(LockRank rank) noexcept : rank_(rank) {}
  CheckedMutex(const CheckedMutex&) = delete;
  CheckedMutex& operator=(const CheckedMutex&) = delete;

  void lock();
  // Cannot wait, and so may be out of order; what is taken after it may not.
  bool try_lock();
  void unlock();

 private:
  std::mutex mutex_;
  const LockRank rank_;
};

// Ends the process if the calling thread holds a checked mutex: it is about to wait for `what`.
void require_no_checked_lock(const char* what) noexcept;

#ifdef POLYHVD_CHECK_LOCK_ORDER
template <LockRank rank>
class OrderedMutex : public CheckedMutex {
 public:
  OrderedMutex() noexcept : CheckedMutex(rank) {}
};
using OrderedCondition = std::condition_variable_any;
inline void require_no_lock(const char* what) noexcept { require_no_checked_lock(what); }
#else
template <LockRank>
using OrderedMutex = std::mutex;
using OrderedCondition = std::condition_variable;
inline void require_no_lock(const char*) noexcept {}
#endif

}  // namespace polyhvd
