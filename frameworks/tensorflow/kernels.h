// The kernels of the collectives: they turn one execution of a TensorFlow op into
// one submission to the core. A thread of TensorFlow's may drive the core for a
// moment (see lend() in c_api.h), and else never blocks.
#pragma once

#include "api/engine_slot.h"
#include "control/types.h"
#include "tf_c_api.h"

namespace polyhvd::tf {

// The slot that all kernels submit through. Never destroyed.
EngineSlot& engine_slot();

// What TensorFlow needs for the kernel of one kind of op: null for a kind without one.
CreateKernel create_function(OpKind kind);
void compute(void* kernel, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done);
void delete_kernel(void* kernel);

// The kernel of the op that returns the generation of the current engine; 0: there is none.
void compute_generation(void* kernel, TF_OpKernelContext* context);

// Registers ops and kernels with TensorFlow. Null, or the op that TensorFlow refused.
// Called once, when the library is loaded.
const char* register_ops();

}  // namespace polyhvd::tf
