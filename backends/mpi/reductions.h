// How MPI reduces our element types: its own operations where they mean what ours do, and
// operations made of our kernels where they do not.
#pragma once

#include <map>
#include <utility>

#include "control/types.h"
#include "mpi/library.h"

namespace polyhvd::mpi {

struct LibraryReduction {
  DType carried = DType::kFloat32;  // the element type that travels
  Handle datatype;
  Handle operation;
};

class Reductions {
 public:
  explicit Reductions(Library& library) : library_(library) {}
  Reductions(const Reductions&) = delete;
  Reductions& operator=(const Reductions&) = delete;
  // Gives the operations that were made back to MPI, which must be in good order.
  void close() noexcept;

  // Sums and products of half types, and whatever scales them, travel as float32, so that
  // they are rounded once, as everywhere in polyhvd.
  LibraryReduction of(DType dtype, ReduceOp op, Scale scale);

 private:
  Handle made_of_kernels(DType dtype, ReduceOp op);

  Library& library_;
  std::map<std::pair<DType, ReduceOp>, Handle> made_;
};

}  // namespace polyhvd::mpi
