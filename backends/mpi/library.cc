#include "mpi/library.h"

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "control/error.h"

// What is declared here by hand follows the MPI standard's C binding, and for values that
// the standard leaves open, mpi.h of Open MPI 4 and 5 and of MPICH 3.4 to 5.

namespace polyhvd::mpi {
namespace {

constexpr std::size_t kTextBytes = 8192;  // the longest of both families' limits
constexpr int kTag = 0;
constexpr int kNobodysTag = 1;

// The functions, for handles of type H.
template <class H>
struct Functions {
  int (*Initialized)(int*);
  int (*Finalized)(int*);
  int (*Init_thread)(int*, char***, int, int*);
  int (*Query_thread)(int*);
  int (*Finalize)();
  int (*Error_string)(int, char*, int*);
  int (*Comm_rank)(H, int*);
  int (*Comm_size)(H, int*);
  int (*Comm_test_inter)(H, int*);
  int (*Comm_set_errhandler)(H, H);
  int (*Comm_idup)(H, H*, H*);
  int (*Comm_split_type)(H, int, int, H, H*);
  int (*Comm_group)(H, H*);
  int (*Comm_create_group)(H, H, int, H*);
  int (*Comm_free)(H*);
  int (*Group_incl)(H, int, const int*, H*);
  int (*Group_free)(H*);
  int (*Op_create)(ReduceFunction, int, H*);
  int (*Op_free)(H*);
  int (*Iallreduce)(const void*, void*, int, H, H, H, H*);
  int (*Ireduce_scatter)(const void*, void*, const int*, H, H, H, H*);
  int (*Iallgatherv)(const void*, int, H, void*, const int*, const int*, H, H, H*);
  int (*Ibcast)(void*, int, H, int, H, H*);
  int (*Ialltoallv)(const void*, const int*, const int*, H, void*, const int*, const int*, H, H,
                    H*);
  int (*Isend)(const void*, int, H, int, int, H, H*);
  int (*Irecv)(void*, int, H, int, int, H, H*);
  int (*Test)(H*, int*, void*);
  int (*Iprobe)(int, int, H, int*, void*);

  void load(void* library) {
#define POLYHVD_FIND(name) find(library, "MPI_" #name, name)
    POLYHVD_FIND(Initialized);
    POLYHVD_FIND(Finalized);
    POLYHVD_FIND(Init_thread);
    POLYHVD_FIND(Query_thread);
    POLYHVD_FIND(Finalize);
    POLYHVD_FIND(Error_string);
    POLYHVD_FIND(Comm_rank);
    POLYHVD_FIND(Comm_size);
    POLYHVD_FIND(Comm_test_inter);
    POLYHVD_FIND(Comm_set_errhandler);
    POLYHVD_FIND(Comm_idup);
    POLYHVD_FIND(Comm_split_type);
    POLYHVD_FIND(Comm_group);
    POLYHVD_FIND(Comm_create_group);
    POLYHVD_FIND(Comm_free);
    POLYHVD_FIND(Group_incl);
    POLYHVD_FIND(Group_free);
    POLYHVD_FIND(Op_create);
    POLYHVD_FIND(Op_free);
    POLYHVD_FIND(Iallreduce);
    POLYHVD_FIND(Ireduce_scatter);
    POLYHVD_FIND(Iallgatherv);
    POLYHVD_FIND(Ibcast);
    POLYHVD_FIND(Ialltoallv);
    POLYHVD_FIND(Isend);
    POLYHVD_FIND(Irecv);
    POLYHVD_FIND(Test);
    POLYHVD_FIND(Iprobe);
#undef POLYHVD_FIND
  }

 private:
  template <class F>
  static void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr) {
      throw Failure(ErrorCode::kInvalidArgument,
                    std::string("it has no ") + name + ", which version 3 of MPI has");
    }
  }
};

// The values that the standard leaves to the libraries.
template <class H>
struct Values {
  H world, info_null, errors_return, bytes;
  std::array<H, kDTypeCount> datatypes;  // by DType; half types and bool as their bits
  std::array<H, 4> operations;           // by BuiltIn
  int shared;                            // how to split by host
  void* in_place;
  void* status_ignore;
};

Values<void*> open_mpi_values(void* library) {
  const auto at = [&](const char* name) {
    void* address = dlsym(library, name);
    if (address == nullptr) {
      throw Failure(ErrorCode::kInvalidArgument, std::string("it has no ") + name);
    }
    return address;
  };
  return {.world = at("ompi_mpi_comm_world"),
          .info_null = at("ompi_mpi_info_null"),
          .errors_return = at("ompi_mpi_errors_return"),
          .bytes = at("ompi_mpi_byte"),
          .datatypes = {at("ompi_mpi_uint8_t"), at("ompi_mpi_int8_t"), at("ompi_mpi_int16_t"),
                        at("ompi_mpi_int32_t"), at("ompi_mpi_int64_t"), at("ompi_mpi_uint16_t"),
                        at("ompi_mpi_uint16_t"), at("ompi_mpi_float"), at("ompi_mpi_double"),
                        at("ompi_mpi_uint8_t"), at("ompi_mpi_uint16_t"), at("ompi_mpi_uint32_t"),
                        at("ompi_mpi_uint64_t")},
          .operations = {at("ompi_mpi_op_sum"), at("ompi_mpi_op_prod"), at("ompi_mpi_op_min"),
                         at("ompi_mpi_op_max")},
          .shared = 0,
          .in_place = reinterpret_cast<void*>(1),
          .status_ignore = nullptr};
}

Values<int> mpich_values() {
  return {.world = 0x44000000,
          .info_null = 0x1c000000,
          .errors_return = 0x54000001,
          .bytes = 0x4c00010d,
          .datatypes = {0x4c00013b, 0x4c000137, 0x4c000238, 0x4c000439, 0x4c00083a, 0x4c00023c,
                        0x4c00023c, 0x4c00040a, 0x4c00080b, 0x4c00013b, 0x4c00023c, 0x4c00043d,
                        0x4c00083e},
          .operations = {0x58000003, 0x58000004, 0x58000002, 0x58000001},
          .shared = 1,
          .in_place = reinterpret_cast<void*>(-1),
          .status_ignore = reinterpret_cast<void*>(1)};
}

template <class H>
class Bound final : public Library {
 public:
  Bound(void* library, Values<H> values, std::string path, std::string version)
      : Library(std::move(path), std::move(version)), values_(values) {
    mpi_.load(library);
  }

  std::string_view family() const noexcept override {
    return std::is_pointer_v<H> ? "Open MPI" : "MPICH";
  }
  Handle handle_of(std::intptr_t number) const noexcept override {
    if constexpr (std::is_pointer_v<H>)
      return make(reinterpret_cast<H>(number));
    else
      return make(static_cast<H>(number));
  }

  bool initialized() const override { return flag("MPI_Initialized", mpi_.Initialized); }
  bool finalized() const override { return flag("MPI_Finalized", mpi_.Finalized); }
  ThreadLevel initialize(ThreadLevel wanted) override {
    int granted = 0;
    check("MPI_Init_thread",
          mpi_.Init_thread(nullptr, nullptr, static_cast<int>(wanted), &granted));
    return static_cast<ThreadLevel>(granted);
  }
  ThreadLevel thread_level() const override {
    int level = 0;
    check("MPI_Query_thread", mpi_.Query_thread(&level));
    return static_cast<ThreadLevel>(level);
  }
  void finalize() override { check("MPI_Finalize", mpi_.Finalize()); }

  Handle world() const noexcept override { return make(values_.world); }
  int rank(Handle c) const override { return number("MPI_Comm_rank", mpi_.Comm_rank, c); }
  int size(Handle c) const override { return number("MPI_Comm_size", mpi_.Comm_size, c); }
  bool joins_two_groups(Handle c) const override {
    return number("MPI_Comm_test_inter", mpi_.Comm_test_inter, c) != 0;
  }
  void return_errors(Handle c) override {
    check("MPI_Comm_set_errhandler", mpi_.Comm_set_errhandler(in(c), values_.errors_return));
  }
  void start_duplicate(Handle c, Handle& out, Handle& request) override {
    check("MPI_Comm_idup", mpi_.Comm_idup(in(c), &in(out), &in(request)));
  }
  Handle split_by_host(Handle c) override {
    Handle local;
    check("MPI_Comm_split_type",
          mpi_.Comm_split_type(in(c), values_.shared, 0, values_.info_null, &in(local)));
    return local;
  }
  Handle create_group(Handle c, std::span<const int> members, int tag) override {
    Handle all, group, made;
    check("MPI_Comm_group", mpi_.Comm_group(in(c), &in(all)));
    int code =
        mpi_.Group_incl(in(all), static_cast<int>(members.size()), members.data(), &in(group));
    mpi_.Group_free(&in(all));
    check("MPI_Group_incl", code);
    code = mpi_.Comm_create_group(in(c), in(group), tag, &in(made));
    mpi_.Group_free(&in(group));
    check("MPI_Comm_create_group", code);
    return made;
  }
  void free_communicator(Handle c) noexcept override { mpi_.Comm_free(&in(c)); }

  Handle bytes() const noexcept override { return make(values_.bytes); }
  Handle datatype(DType dtype) const noexcept override {
    return make(values_.datatypes[static_cast<std::size_t>(dtype)]);
  }
  Handle operation(BuiltIn op) const noexcept override {
    return make(values_.operations[static_cast<std::size_t>(op)]);
  }
  Handle make_operation(ReduceFunction function, bool commutes) override {
    Handle op;
    check("MPI_Op_create", mpi_.Op_create(function, commutes ? 1 : 0, &in(op)));
    return op;
  }
  void free_operation(Handle op) noexcept override { mpi_.Op_free(&in(op)); }

  void start_allreduce(void* buffer, int count, Handle datatype, Handle op, Handle c,
                       Handle& request) override {
    check("MPI_Iallreduce", mpi_.Iallreduce(values_.in_place, buffer, count, in(datatype), in(op),
                                            in(c), &in(request)));
  }
  void start_reduce_scatter(const void* from, void* to, const int* counts, Handle datatype,
                            Handle op, Handle c, Handle& request) override {
    check("MPI_Ireduce_scatter",
          mpi_.Ireduce_scatter(from, to, counts, in(datatype), in(op), in(c), &in(request)));
  }
  void start_allgather(const void* from, int count, void* to, const int* counts, const int* offsets,
                       Handle c, Handle& request) override {
    check("MPI_Iallgatherv", mpi_.Iallgatherv(from, count, values_.bytes, to, counts, offsets,
                                              values_.bytes, in(c), &in(request)));
  }
  void start_broadcast(void* buffer, int count, int root, Handle c, Handle& request) override {
    check("MPI_Ibcast", mpi_.Ibcast(buffer, count, values_.bytes, root, in(c), &in(request)));
  }
  void start_alltoall(const void* from, const int* from_counts, const int* from_offsets, void* to,
                      const int* to_counts, const int* to_offsets, Handle c,
                      Handle& request) override {
    check("MPI_Ialltoallv",
          mpi_.Ialltoallv(from, from_counts, from_offsets, values_.bytes, to, to_counts, to_offsets,
                          values_.bytes, in(c), &in(request)));
  }
  void start_send(const void* data, int count, int to, Handle c, Handle& request) override {
    check("MPI_Isend", mpi_.Isend(data, count, values_.bytes, to, kTag, in(c), &in(request)));
  }
  void start_receive(void* data, int count, int from, Handle c, Handle& request) override {
    check("MPI_Irecv", mpi_.Irecv(data, count, values_.bytes, from, kTag, in(c), &in(request)));
  }
  // Looks for a message that never comes: libraries make progress before they return false.
  void move_along(Handle c) override {
    int found = 0;
    check("MPI_Iprobe", mpi_.Iprobe(0, kNobodysTag, in(c), &found, values_.status_ignore));
  }
  bool test(Handle& request) override {
    int done = 0;
    check("MPI_Test", mpi_.Test(&in(request), &done, values_.status_ignore));
    return done != 0;
  }

 private:
  static H& in(Handle& handle) noexcept {
    if constexpr (std::is_pointer_v<H>)
      return handle.address;
    else
      return handle.number;
  }
  static Handle make(H value) noexcept {
    Handle handle;
    in(handle) = value;
    return handle;
  }

  void check(const char* function, int code) const {
    if (code == 0) return;
    std::array<char, kTextBytes> text{};
    int length = 0;
    mpi_.Error_string(code, text.data(), &length);
    throw Failure(ErrorCode::kInternal, std::string(function) + " of " + path() +
                                            " failed: " + (length > 0 ? text.data() : "no text") +
                                            " (code " + std::to_string(code) + ")");
  }
  bool flag(const char* function, int (*ask)(int*)) const {
    int value = 0;
    check(function, ask(&value));
    return value != 0;
  }
  int number(const char* function, int (*ask)(H, int*), Handle c) const {
    int value = 0;
    check(function, ask(in(c), &value));
    return value;
  }

  Functions<H> mpi_;
  Values<H> values_;
};

std::string path_of(void* library, const std::string& name) {
  Dl_info info{};
  void* function = dlsym(library, "MPI_Init_thread");
  if (function != nullptr && dladdr(function, &info) != 0 && info.dli_fname != nullptr) {
    return info.dli_fname;
  }
  return name;
}

std::shared_ptr<Library> bind(void* library, const std::string& name) {
  const auto ask =
      reinterpret_cast<int (*)(char*, int*)>(dlsym(library, "MPI_Get_library_version"));
  if (ask == nullptr) throw Failure(ErrorCode::kInvalidArgument, "it is not an MPI library");
  std::array<char, kTextBytes> text{};
  int length = 0;
  ask(text.data(), &length);
  std::string version(text.data());  // Open MPI counts the final zero as well
  version = version.substr(0, version.find('\n'));
  // "MPICH Version:      4.2.0"
  std::ranges::replace(version, '\t', ' ');
  const auto both_blank = [](char a, char b) { return a == ' ' && b == ' '; };
  version.erase(std::unique(version.begin(), version.end(), both_blank), version.end());
  const std::string path = path_of(library, name);
  if (dlsym(library, "ompi_mpi_comm_world") != nullptr) {
    return std::make_shared<Bound<void*>>(library, open_mpi_values(library), path, version);
  }
  // Only this family has integers for handles; of others nothing is known.
  const bool mpich = version.starts_with("MPICH") || version.starts_with("Intel") ||
                     version.starts_with("MVAPICH") || version.starts_with("CRAY");
  if (!mpich || path.find("libmpi_abi") != std::string::npos) {
    throw Failure(ErrorCode::kInvalidArgument,
                  "its type of handles is not supported (" + version + ")");
  }
  return std::make_shared<Bound<int>>(library, mpich_values(), path, version);
}

}  // namespace

std::string_view name_of(ThreadLevel level) noexcept {
  constexpr std::array<std::string_view, 4> kNames{"MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED",
                                                   "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE"};
  return kNames.at(static_cast<std::size_t>(level));
}

std::shared_ptr<Library> open_library(std::span<const std::string> names, bool stays) {
  std::string tried;
  for (const std::string& name : names) {
    // Global: parts of Open MPI that are loaded later look for its symbols. Never closed, as
    // MPI's own threads and handlers may outlive us.
    void* library = dlopen(name.c_str(), stays ? RTLD_NOW | RTLD_GLOBAL : RTLD_LAZY | RTLD_LOCAL);
    std::string reason;
    if (library == nullptr) {
      reason = dlerror();
    } else {
      try {
        auto bound = bind(library, name);
        if (!stays) dlclose(library);
        return bound;
      } catch (const Failure& failure) {
        reason = name + ": " + failure.what();
      }
    }
    tried += (tried.empty() ? "" : "; ") + reason;
  }
  throw Failure(ErrorCode::kInvalidArgument, tried.empty() ? "no place to look at" : tried);
}

}  // namespace polyhvd::mpi
