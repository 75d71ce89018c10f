// The TensorFlow op library. tf.load_op_library() runs the constructor, which finds
// TensorFlow's C API in the process and registers the ops; ctypes hands over the
// engine. Links to nothing, holds no semantics of collectives.
#include <dlfcn.h>

#include "kernels.h"
#include "tf_c_api.h"

#define POLYHVD_EXPORT extern "C" __attribute__((visibility("default")))

namespace polyhvd::tf {

TfApi tf;

const char* TfApi::load() {
  // By soname: the library is in the process already, wherever it was installed.
  void* library = dlopen("libtensorflow_framework.so.2", RTLD_NOLOAD | RTLD_NOW);
  if (library == nullptr) return "libtensorflow_framework.so.2";
#define X(ret, name, parameters)                                  \
  name = reinterpret_cast<decltype(name)>(dlsym(library, #name)); \
  if (name == nullptr) return #name;
  POLYHVD_TF_API(X)
#undef X
  return nullptr;
}

namespace {

const char* g_problem = nullptr;  // written only by the constructor

// Hands TensorFlow a callback on the heap and looks whether it was run, and deleted.
bool probe_done_callback() {
  static bool ran = false;
  static int copies = 1;
  const auto manage = [](void** to, void* const* from, int operation) {
    if (operation == Callback::kClone) to[0] = from[0];
    copies += operation == Callback::kClone ? 1 : operation == Callback::kDestroy ? -1 : 0;
    return false;
  };
  auto* callback = new Callback{{}, manage, [](void* const*) { ran = true; }};
  tf.TF_RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(callback));
  tf.done_is_owned = copies == 0;
  if (!tf.done_is_owned) delete callback;
  return ran;
}

__attribute__((constructor)) void on_load() {
  g_problem = tf.load();
  if (g_problem != nullptr) return;
  if (!probe_done_callback()) {
    g_problem = "a TF_RunAsyncOpKernelDoneCallback that runs a std::function";
    return;
  }
  g_problem = register_ops();
}

}  // namespace
}  // namespace polyhvd::tf

// What this library misses in the running TensorFlow, or null.
POLYHVD_EXPORT const char* polyhvd_tensorflow_problem() { return polyhvd::tf::g_problem; }

// The version that the core checks before it returns a table.
POLYHVD_EXPORT std::uint32_t polyhvd_tensorflow_api_version() { return POLYHVD_C_API_VERSION; }

// The table of the current engine, or null. 0 for a table of another version than this
// library; then there is no engine.
POLYHVD_EXPORT int polyhvd_tensorflow_set_engine(const polyhvd_engine_api* api) {
  return polyhvd::tf::engine_slot().set(api) ? 1 : 0;
}

POLYHVD_EXPORT void polyhvd_tensorflow_forget_engine() { polyhvd::tf::engine_slot().forget(); }
