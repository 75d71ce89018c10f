#include "nccl/library.h"

#include <dlfcn.h>

#include "control/error.h"

namespace polyhvd::nccl {
namespace {

constexpr const char* kSoname = "libnccl.so.2";

Functions load(void* library) {
  Functions f{};
  const auto find_any = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
  };
  const auto find = [&](const char* name, auto& function) {
    find_any(name, function);
    if (function == nullptr) {
      throw Failure(ErrorCode::kInvalidArgument, std::string("it has no ") + name);
    }
  };
  find("ncclGetErrorString", f.GetErrorString);
  find("ncclGetUniqueId", f.GetUniqueId);
  find("ncclCommInitRankConfig", f.CommInitRankConfig);
  find("ncclCommGetAsyncError", f.CommGetAsyncError);
  find("ncclCommFinalize", f.CommFinalize);
  find("ncclCommDestroy", f.CommDestroy);
  find("ncclCommAbort", f.CommAbort);
  find("ncclGroupStart", f.GroupStart);
  find("ncclGroupEnd", f.GroupEnd);
  find("ncclAllReduce", f.AllReduce);
  find("ncclReduceScatter", f.ReduceScatter);
  find("ncclAllGather", f.AllGather);
  find("ncclBroadcast", f.Broadcast);
  find("ncclSend", f.Send);
  find("ncclRecv", f.Recv);
  find("ncclRedOpCreatePreMulSum", f.RedOpCreatePreMulSum);
  find("ncclRedOpDestroy", f.RedOpDestroy);
  find_any("ncclGetLastError", f.GetLastError);
  find_any("ncclMemAlloc", f.MemAlloc);
  find_any("ncclMemFree", f.MemFree);
  find_any("ncclCommRegister", f.CommRegister);
  find_any("ncclCommDeregister", f.CommDeregister);
  return f;
}

std::shared_ptr<const Library> bind(void* library, const std::string& name) {
  void* const symbol = dlsym(library, "ncclGetVersion");
  if (symbol == nullptr) throw Failure(ErrorCode::kInvalidArgument, "it is not NCCL");
  int version = 0;
  reinterpret_cast<Result (*)(int*)>(symbol)(&version);
  if (version < kVersionMin) {
    throw Failure(ErrorCode::kInvalidArgument, "it is NCCL " + version_text(version) +
                                                   "; polyhvd needs " + version_text(kVersionMin) +
                                                   " or later");
  }
  Dl_info info{};
  const bool known = dladdr(symbol, &info) != 0 && info.dli_fname != nullptr;
  return std::make_shared<const Library>(load(library), known ? info.dli_fname : name, version);
}

}  // namespace

std::string version_text(int version) {
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const int minor = version < 10000 ? version / 100 % 10 : version / 100 % 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(version % 100);
}

std::string Library::words(Result result, Comm comm) const {
  std::string text = call.GetErrorString(result);
  if (call.GetLastError == nullptr) return text;
  const char* last = call.GetLastError(comm);
  if (last != nullptr && *last != '\0') text += std::string(" (") + last + ")";
  return text;
}

void Library::check(const char* function, Result result, Comm comm) const {
  if (result == Result::kSuccess || result == Result::kInProgress) return;
  throw Failure(ErrorCode::kInternal, std::string(function) + " of NCCL " + version_text(version_) +
                                          " (" + path_ + ") failed: " + words(result, comm) +
                                          "; set NCCL_DEBUG=WARN in the environment for details");
}

std::shared_ptr<const Library> open_library(std::span<const std::string> names) {
  // A framework's own: two of them would each want the GPU's and the network's resources.
  if (void* library = dlopen(kSoname, RTLD_NOW | RTLD_NOLOAD)) return bind(library, kSoname);
  std::string tried;
  for (const std::string& name : names) {
    std::string reason;
    if (void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) {
      try {
        return bind(library, name);
      } catch (const Failure& failure) {
        reason = name + ": " + failure.what();
      }
    } else {
      reason = dlerror();
    }
    tried += (tried.empty() ? "" : "; ") + reason;
  }
  throw Failure(ErrorCode::kInvalidArgument, tried.empty() ? "no place to look at" : tried);
}

}  // namespace polyhvd::nccl
