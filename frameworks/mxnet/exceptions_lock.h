// MXNet 1.9.1 lists the exceptions of its operations in a std::vector, to which every worker
// adds in ThreadedEngine::AddToGlobalExceptions() (src/engine/threaded_engine.h), without a lock:
// two operations that are skipped at the same time break the heap. libmxnet calls that function
// through its table of jump slots, so the calls can be given a lock.
#pragma once

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <mutex>

namespace polyhvd::mxnet {

class ExceptionsLock {
 public:
  // Whether calls within `library`, which stays loaded, take a lock from now on. Where the
  // function or its slot is not found, nothing changes.
  static bool install(void* library) noexcept {
    original() = reinterpret_cast<Add>(dlsym(library, kName));
    link_map* map = nullptr;
    if (original() == nullptr || dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) return false;
    ElfW(Addr)* slot = slot_in(*map);
    if (slot == nullptr) return false;
    const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t page = reinterpret_cast<std::uintptr_t>(slot) & ~(page_bytes - 1);
    void* start = reinterpret_cast<void*>(page);
    if (mprotect(start, page_bytes, PROT_READ | PROT_WRITE) != 0) return false;
    __atomic_store_n(slot, reinterpret_cast<ElfW(Addr)>(&add), __ATOMIC_RELEASE);
    return true;
  }

  // In a forked child, whose parent's other threads may have held it.
  static void forget() noexcept { new (&mutex()) std::mutex; }

 private:
  // A member function of two pointers: the engine and a std::shared_ptr<std::exception_ptr>.
  using Add = void (*)(void* engine, const void* reference);
  static constexpr char kName[] =
      "_ZN5mxnet6engine14ThreadedEngine21AddToGlobalExceptionsERKSt10shared_ptrINSt15__"
      "exception_ptr13exception_ptrEE";

  static Add& original() noexcept {
    static Add function = nullptr;  // set once, before any call
    return function;
  }
  static std::mutex& mutex() noexcept {
    static std::mutex& one = *new std::mutex;  // never destroyed: workers outlive our statics
    return one;
  }
  static void add(void* engine, const void* reference) {
    std::lock_guard lock(mutex());
    original()(engine, reference);
  }

  // Through which calls of the function go, or null.
  static ElfW(Addr) * slot_in(const link_map& map) noexcept {
    const ElfW(Sym)* symbols = nullptr;
    const char* names = nullptr;
    const ElfW(Rela)* jumps = nullptr;
    std::size_t bytes = 0;
    for (const ElfW(Dyn)* entry = map.l_ld; entry->d_tag != DT_NULL; ++entry) {
      if (entry->d_tag == DT_SYMTAB) symbols = reinterpret_cast<ElfW(Sym)*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_STRTAB) names = reinterpret_cast<const char*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_JMPREL) jumps = reinterpret_cast<ElfW(Rela)*>(entry->d_un.d_ptr);
      if (entry->d_tag == DT_PLTRELSZ) bytes = entry->d_un.d_val;
      if (entry->d_tag == DT_PLTREL && entry->d_un.d_val != DT_RELA) return nullptr;
    }
    if (symbols == nullptr || names == nullptr || jumps == nullptr) return nullptr;
    for (std::size_t i = 0; i < bytes / sizeof *jumps; ++i) {
      const ElfW(Sym) & symbol = symbols[ELF64_R_SYM(jumps[i].r_info)];
      if (std::strcmp(names + symbol.st_name, kName) != 0) continue;
      return reinterpret_cast<ElfW(Addr)*>(map.l_addr + jumps[i].r_offset);
    }
    return nullptr;
  }
};

}  // namespace polyhvd::mxnet
