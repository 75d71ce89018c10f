// MXNet 1.9.1 lists the exceptions of its operations in a std::vector, without a lock: every thread
// adds to it that starts an operation on an array that holds one, in
// ThreadedEngine::AddToGlobalExceptions() (src/engine/threaded_engine.h), or that completes one
// that has failed or was skipped, in OnComplete(), where the compiler has put the same lines. Two
// at the same time break the heap. libmxnet calls both functions through its table of jump slots,
// so the calls can be given a lock.
#pragma once

#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>

namespace polyhvd::mxnet {

class ExceptionsLock {
 public:
  // Whether calls within `library`, which stays loaded, take a lock from now on. Where a
  // function or its slot is not found, nothing changes.
  static bool install(void* library) noexcept {
    link_map* map = nullptr;
    if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) return false;
    ElfW(Addr)* const slots[] = {slot_in(*map, kAdd), slot_in(*map, kOnComplete)};
    original_add() = reinterpret_cast<Member>(dlsym(library, kAdd));
    original_complete() = reinterpret_cast<Member>(dlsym(library, kOnComplete));
    if (slots[0] == nullptr || slots[1] == nullptr) return false;
    if (original_add() == nullptr || original_complete() == nullptr) return false;
    return replace(slots[0], &add) && replace(slots[1], &complete);
  }

  // There may be exceptions from now on. Before, no thread needs the lock to complete an operation.
  static void arm() noexcept { armed().store(true); }

  // In a forked child, whose parent's other threads may have held it.
  static void forget() noexcept { new (&mutex()) std::recursive_mutex; }

 private:
  // A member function: of the engine and a std::shared_ptr<std::exception_ptr>, or a ThreadedOpr.
  using Member = void (*)(void* engine, void* argument);
  static constexpr char kAdd[] =
      "_ZN5mxnet6engine14ThreadedEngine21AddToGlobalExceptionsERKSt10shared_ptrINSt15__"
      "exception_ptr13exception_ptrEE";
  static constexpr char kOnComplete[] =
      "_ZN5mxnet6engine14ThreadedEngine10OnCompleteEPNS0_11ThreadedOprE";

  static Member& original_add() noexcept {
    static Member function = nullptr;  // set once, before any call
    return function;
  }
  static Member& original_complete() noexcept {
    static Member function = nullptr;  // likewise
    return function;
  }
  // Recursive: when an operation completes, its arrays are freed by further operations.
  static std::recursive_mutex& mutex() noexcept {
    static auto& one = *new std::recursive_mutex;  // never destroyed: workers outlive our statics
    return one;
  }
  // An atomic, as workers look at it without the lock. One that completes an operation that has an
  // exception comes after the first of all, and after arm().
  static std::atomic<bool>& armed() noexcept {
    static std::atomic<bool> flag{false};
    return flag;
  }
  static void add(void* engine, void* reference) {
    arm();
    const std::lock_guard lock(mutex());
    original_add()(engine, reference);
  }
  static void complete(void* engine, void* operation) {
    if (!armed().load()) return original_complete()(engine, operation);
    const std::lock_guard lock(mutex());
    original_complete()(engine, operation);
  }

  static bool replace(ElfW(Addr) * slot, Member function) noexcept {
    const auto page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
    const std::uintptr_t page = reinterpret_cast<std::uintptr_t>(slot) & ~(page_bytes - 1);
    void* start = reinterpret_cast<void*>(page);
    if (mprotect(start, page_bytes, PROT_READ | PROT_WRITE) != 0) return false;
    __atomic_store_n(slot, reinterpret_cast<ElfW(Addr)>(function), __ATOMIC_RELEASE);
    return true;
  }

  // Through which calls of a function go, or null.
  static ElfW(Addr) * slot_in(const link_map& map, const char* name) noexcept {
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
      if (std::strcmp(names + symbol.st_name, name) != 0) continue;
      return reinterpret_cast<ElfW(Addr)*>(map.l_addr + jumps[i].r_offset);
    }
    return nullptr;
  }
};

}  // namespace polyhvd::mxnet
