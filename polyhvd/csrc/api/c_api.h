// The core as native adapters see it: a table of C functions. An adapter (the
// TensorFlow op library, the MXNet binding) is its own shared library, links to
// nothing, and holds one slot with the table of the engine that is current.
//
// Everything here is C, and may change only together with POLYHVD_C_API_VERSION.
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define POLYHVD_C_API_VERSION 7

// A dense row-major tensor; dtype, device_kind, kind and op are the values of control/types.h.
typedef struct polyhvd_tensor {
  void* data;            // null only where there are no elements
  const int64_t* shape;  // null only for a scalar
  int32_t ndim;
  int32_t dtype;
  int32_t device_kind;
  int32_t device_index;
} polyhvd_tensor;

typedef struct polyhvd_submission {
  uint32_t size;  // sizeof(polyhvd_submission)
  int32_t kind;
  const char* name;  // copied; null: a call without one, which is counted in submit()
  int32_t op;
  int32_t root;  // broadcast: a world rank
  double prescale;
  double postscale;
  int32_t priority;
  uint32_t process_set;
  const polyhvd_tensor* inputs;   // arrays are copied, memory stays the caller's until done
  const polyhvd_tensor* outputs;  // null: every output comes from allocate()
  int32_t count;                  // number of tensors; 0 for a barrier or a join
  // 1: a submission under a name that is in flight waits for it instead of failing.
  int32_t queue_duplicates;
  const char* where;  // "train.py:88" or null
  // Null, or set by submit() to whether lend() is to follow at once on this thread: the
  // operation is small and the only one, and no thread was woken for it.
  int32_t* lends;
  // alltoall: rows for each member, as int64; null for equal parts.
  const int64_t* numbers;
  int32_t number_count;
  int32_t reserved;  // 0
  // Of a call without a name that was counted before: which one it is, and `name` is what it
  // is called. 0 for all others.
  uint64_t turn;
  // Of the engine that it was made for; 0: whichever is current. With an engine of another
  // generation it fails as lost: what it belongs to has ended.
  uint64_t generation;

  // Tensors on a device; both null for tensors of the host, or it is an invalid argument. They
  // are what the device's own library calls them (CUDA: CUstream, CUevent), of its primary
  // context on `device_index`, which is the same for all tensors.
  //
  // `event`: the caller has recorded it after the work that makes the inputs. Nothing reads them
  // before the device has reached it, and no thread waits for that: submit() returns at once.
  // The caller neither destroys nor records it again before done(). Null: an event of the core's
  // is recorded on `stream` in submit(), after all that the stream was given by then.
  //
  // `stream`: whose work uses the outputs; null: the device's default stream. Before done() says
  // that all went well, the stream is made to wait for the outputs, so that what is given to it
  // afterwards, in done() or later, reads the results. done() itself comes when the work is
  // ordered, not when the device is through with it: the inputs' memory is not to be freed, or
  // used by another stream, but after the stream has got there. After an error the outputs are
  // undefined.
  void* stream;
  void* event;

  void* context;
  // Null, or called once for an allgather and an alltoall, when all ranks have agreed, before
  // allocate() and before data moves, on any thread, with no lock held; `rows` lasts for the call.
  // allgather: rows[m * count + i] are those that member m has of tensor i, 0 if it has joined.
  // alltoall: rows[m] come from member m, -1 if it has joined.
  void (*sized)(void* context, const int64_t* rows, int32_t row_count);
  // Memory for output `index` of the given shape, or null on failure. Called
  // once the size is agreed, on any thread, with no lock held. Outputs have their
  // inputs' dtype and device; an alltoall has a second one, the rows received from each member,
  // and a join has one, the rank that joined last (a scalar), both as int32 of the host.
  // Null: results that have no place in `outputs` are dropped.
  void* (*allocate)(void* context, int32_t index, const int64_t* shape, int32_t ndim);
  // Exactly once, after the engine has left the tensors' memory, on any thread,
  // with no lock held. error_code is 0 (message null) or a value of control/error.h.
  void (*done)(void* context, int32_t error_code, const char* message);
} polyhvd_submission;

typedef struct polyhvd_engine_api {
  uint32_t version;  // POLYHVD_C_API_VERSION; it comes first in every version
  uint32_t size;     // sizeof(polyhvd_engine_api)
  uint64_t generation;
  void* engine;
  // 0, or an error code with its text in `message`, cut to `message_bytes`; then done() is not
  // called. A submission that makes no sense is refused, and leaves nothing behind.
  int32_t (*submit)(void* engine, const polyhvd_submission* submission, char* message,
                    size_t message_bytes);
  // Lends the calling thread to the engine, for 0.2 ms at most while the
  // other ranks are late. done() of any operation may run meanwhile, so no lock is to be held.
  void (*lend)(void* engine);
} polyhvd_engine_api;

#ifdef __cplusplus
}  // extern "C"
#endif
