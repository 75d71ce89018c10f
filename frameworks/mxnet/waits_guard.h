// MXNet 1.9.1 waits for arrays in many places of its own code: to save them, to learn the shape of
// what boolean_mask makes, to copy. All of them call the engine's virtual function WaitForVar()
// (src/engine/threaded_engine.cc), which hands an error out and forgets it for all that shares it.
// The table of virtual functions can be given another one.
#pragma once

#include <dlfcn.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>

namespace polyhvd::mxnet {

class WaitsGuard {
 public:
  // A member function: the engine, and a variable of it. Throws what the variable holds.
  using Wait = void (*)(void* engine, void* variable);

  // Whether `wait` is called instead from now on, by the engine that `library`, which stays loaded,
  // has made by now. It may call original(). Where the function is not found, nothing changes.
  static bool install(void* library, Wait wait) noexcept {
    const auto engine = reinterpret_cast<void* (*)()>(dlsym(library, kGetEngine));
    void* function = dlsym(library, kWaitForVar);
    if (engine == nullptr || function == nullptr) return false;
    original_wait() = reinterpret_cast<Wait>(function);
    void** table = *static_cast<void***>(engine());
    for (int i = 0; i < kVirtualFunctionsMax; ++i) {
      if (table[i] == function) return replace(&table[i], reinterpret_cast<void*>(wait));
    }
    return false;  // another kind of engine
  }

  static void original(void* engine, void* variable) { original_wait()(engine, variable); }

 private:
  static constexpr char kGetEngine[] = "_ZN5mxnet6Engine3GetEv";
  static constexpr char kWaitForVar[] = "_ZN5mxnet6engine14ThreadedEngine10WaitForVarEPNS0_3VarE";
  static constexpr int kVirtualFunctionsMax = 16;  // of mxnet::Engine, which has no fewer

  static Wait& original_wait() noexcept {
    static Wait function = nullptr;  // set once, before any call
    return function;
  }

  static bool replace(void** slot, void* function) noexcept {
    const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t page = reinterpret_cast<std::uintptr_t>(slot) & ~(page_bytes - 1);
    if (mprotect(reinterpret_cast<void*>(page), page_bytes, PROT_READ | PROT_WRITE) != 0) {
      return false;
    }
    __atomic_store_n(slot, function, __ATOMIC_RELEASE);
    return true;
  }
};

}  // namespace polyhvd::mxnet
