// The MPI library that is found at run time, behind one interface for both families of
// handles: addresses (Open MPI) and integers (MPICH and its ABI family). No header of MPI
// is needed. Errors of MPI are thrown as Failure with MPI's own text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "control/types.h"

namespace polyhvd::mpi {

// A communicator, a request, a datatype or an operation. MPI writes right into it.
union Handle {
  void* address = nullptr;
  int number;
};

enum class ThreadLevel : int { kSingle = 0, kFunneled = 1, kSerialized = 2, kMultiple = 3 };
std::string_view name_of(ThreadLevel level) noexcept;

// What MPI calls to reduce two vectors of `*count` elements: inout = in op inout.
using ReduceFunction = void (*)(void* in, void* inout, int* count, void* datatype);

// Reductions that MPI brings along.
enum class BuiltIn : std::uint8_t { kSum = 0, kProduct = 1, kMin = 2, kMax = 3 };

// Thread-safe as far as MPI was asked for it. What starts something returns at once; its
// buffers and counts belong to MPI until test() returns true.
class Library {
 public:
  virtual ~Library() = default;

  const std::string& path() const noexcept { return path_; }
  // The first line of the library's version, such as "Open MPI v4.1.4, ...".
  const std::string& version() const noexcept { return version_; }
  virtual std::string_view family() const noexcept = 0;
  // A handle as another library holds it, given as a number.
  virtual Handle handle_of(std::intptr_t number) const noexcept = 0;

  virtual bool initialized() const = 0;
  virtual bool finalized() const = 0;
  // Initialises MPI and returns what was granted.
  virtual ThreadLevel initialize(ThreadLevel wanted) = 0;
  virtual ThreadLevel thread_level() const = 0;
  virtual void finalize() = 0;

  virtual Handle world() const noexcept = 0;
  virtual int rank(Handle communicator) const = 0;
  virtual int size(Handle communicator) const = 0;
  // Whether it joins two groups that do not overlap.
  virtual bool joins_two_groups(Handle communicator) const = 0;
  // Errors on this communicator come back, instead of ending the program.
  virtual void return_errors(Handle communicator) = 0;
  // `out` is the new communicator once the request is done.
  virtual void start_duplicate(Handle communicator, Handle& out, Handle& request) = 0;
  // These block until all ranks of the communicator, or all members, have called them.
  virtual Handle split_by_host(Handle communicator) = 0;
  virtual Handle create_group(Handle communicator, std::span<const int> members, int tag) = 0;
  virtual void free_communicator(Handle communicator) noexcept = 0;

  virtual Handle bytes() const noexcept = 0;
  virtual Handle datatype(DType dtype) const noexcept = 0;
  virtual Handle operation(BuiltIn op) const noexcept = 0;
  // Unless it commutes, terms are reduced in order of rank.
  virtual Handle make_operation(ReduceFunction function, bool commutes) = 0;
  virtual void free_operation(Handle operation) noexcept = 0;

  // `buffer` holds this rank's terms, and then the result.
  virtual void start_allreduce(void* buffer, int count, Handle datatype, Handle op,
                               Handle communicator, Handle& request) = 0;
  virtual void start_reduce_scatter(const void* in, void* out, const int* counts, Handle datatype,
                                    Handle op, Handle communicator, Handle& request) = 0;
  virtual void start_allgather(const void* in, int bytes, void* out, const int* counts,
                               const int* offsets, Handle communicator, Handle& request) = 0;
  virtual void start_broadcast(void* buffer, int bytes, int root, Handle communicator,
                               Handle& request) = 0;
  virtual void start_alltoall(const void* in, const int* in_counts, const int* in_offsets,
                              void* out, const int* out_counts, const int* out_offsets,
                              Handle communicator, Handle& request) = 0;
  virtual void start_send(const void* data, int bytes, int to, Handle communicator,
                          Handle& request) = 0;
  virtual void start_receive(void* data, int bytes, int from, Handle communicator,
                             Handle& request) = 0;
  // Moves everything along, also what has ended here and not yet elsewhere.
  virtual void move_along(Handle communicator) = 0;
  // The same; true when the request is done, and forever after.
  virtual bool test(Handle& request) = 0;

 protected:
  Library(std::string path, std::string version)
      : path_(std::move(path)), version_(std::move(version)) {}

 private:
  std::string path_;
  std::string version_;
};

// Opens the first of these that is there: file names, or paths. A library that is in the
// process already is never loaded twice. Throws Failure(kInvalidArgument) with the loader's
// words for each when none can be used. One that does not stay can be asked for its path and
// version, and nothing else.
std::shared_ptr<Library> open_library(std::span<const std::string> names, bool stays = true);

}  // namespace polyhvd::mpi
