// Exceptions of MXNet pass through our frames, and must be unwound by the library that throws them:
// libgcc_s. A wheel has libc++ and its own unwinder inside; these functions replace that one.
// A build with libstdc++ uses libgcc_s in any case.
#include <version>

#ifdef _LIBCPP_VERSION
#include <dlfcn.h>
#include <unwind.h>

#include <cstdint>
#include <cstdlib>

namespace {

// MXNet needs the library, too, so it is in the process. Without it no exception could be thrown.
template <class Function>
Function find(const char* name) noexcept {
  static void* const library = dlopen("libgcc_s.so.1", RTLD_LAZY);
  void* const function = library == nullptr ? nullptr : dlsym(library, name);
  if (function == nullptr) std::abort();
  return reinterpret_cast<Function>(function);
}

}  // namespace

#define POLYHVD_FORWARD(result, name, parameters, ...)              \
  result name parameters {                                          \
    static const auto function = find<result(*) parameters>(#name); \
    return function(__VA_ARGS__);                                   \
  }

extern "C" {
POLYHVD_FORWARD(_Unwind_Reason_Code, _Unwind_RaiseException, (_Unwind_Exception * thrown), thrown)
POLYHVD_FORWARD(void, _Unwind_DeleteException, (_Unwind_Exception * thrown), thrown)
POLYHVD_FORWARD(std::uintptr_t, _Unwind_GetGR, (_Unwind_Context * context, int index), context,
                index)
POLYHVD_FORWARD(void, _Unwind_SetGR, (_Unwind_Context * context, int index, std::uintptr_t value),
                context, index, value)
POLYHVD_FORWARD(std::uintptr_t, _Unwind_GetIP, (_Unwind_Context * context), context)
POLYHVD_FORWARD(void, _Unwind_SetIP, (_Unwind_Context * context, std::uintptr_t value), context,
                value)
POLYHVD_FORWARD(std::uintptr_t, _Unwind_GetRegionStart, (_Unwind_Context * context), context)
POLYHVD_FORWARD(void*, _Unwind_GetLanguageSpecificData, (_Unwind_Context * context), context)

void _Unwind_Resume(_Unwind_Exception* thrown) {
  static const auto function = find<void (*)(_Unwind_Exception*)>("_Unwind_Resume");
  function(thrown);
  std::abort();
}
}
#endif
