// The core as native adapters see it: a table of C functions. An adapter (the
// TensorFlow op library, the MXNet binding) is its own shared library, links to
// nothing, and holds one slot with the table of the engine that is current.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define POLYHVD_C_API_VERSION 5

// A dense row-major tensor; dtype, kind and op are the values of types.h.
typedef struct polyhvd_tensor {
  void* data;
  const int64_t* shape;
  int32_t ndim;
  int32_t dtype;
  int32_t device_kind;
  int32_t device_index;
} polyhvd_tensor;

typedef struct polyhvd_submission {
  const char* name;  // copied; null: a call without one, which is counted in submit()
  int32_t kind;
  int32_t op;
  int32_t root;  // broadcast: a world rank
  int32_t priority;
  double prescale;
  double postscale;
  uint32_t process_set;
  int32_t count;                  // number of tensors; 0 for a barrier or a join
  const polyhvd_tensor* inputs;   // arrays are copied, memory stays the caller's until done
  const polyhvd_tensor* outputs;  // null: every output comes from allocate()
  const char* where;              // "train.py:88" or null
  // 1: a submission under a name that is in flight waits for it instead of failing.
  int32_t queue_duplicates;
  // Null, or set by submit() to whether lend() is to follow at once on this thread: the
  // operation is small and alone, and nobody was woken for it.
  int32_t* lends;
  void* context;
  // alltoall: rows for each member, as int64; null for equal parts.
  const int64_t* numbers;
  int32_t number_count;
  // Memory for output `index` of the given shape, or null on failure. Called
  // once the size is agreed, on any thread, with no lock held. Outputs have their
  // inputs' dtype; an alltoall has a second one, the rows received from each member,
  // and a join has one, the rank that joined last (a scalar), both as int32.
  void* (*allocate)(void* context, int32_t index, const int64_t* shape, int32_t ndim);
  // Exactly once, after the engine has left the tensors' memory, on any thread,
  // with no lock held. error_code is 0 (message null) or a value of error.h.
  void (*done)(void* context, int32_t error_code, const char* message);
  // Of a call without a name that was counted before: which one it is, and `name` is what it
  // is called. 0 for all others.
  uint64_t turn;
  // Of the engine that it was made for; 0: whichever is current. With an engine of another
  // generation it fails as lost: what it belongs to has ended.
  uint64_t generation;
} polyhvd_submission;

typedef struct polyhvd_engine_api {
  uint32_t version;  // POLYHVD_C_API_VERSION
  uint32_t size;     // sizeof(polyhvd_engine_api)
  uint64_t generation;
  void* engine;
  // 0, or an error code with its text in `message`; then done() is not called.
  int32_t (*submit)(void* engine, const polyhvd_submission* submission, char* message,
                    size_t message_bytes);
  // Lends the calling thread to the engine, for 0.2 ms at most while the
  // other ranks are late. done() of any operation may run meanwhile, so no lock is to be held.
  void (*lend)(void* engine);
} polyhvd_engine_api;

#ifdef __cplusplus
}  // extern "C"
#endif
