// What is known of one collective between MXNet's engine, the core and Python.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "api/c_api.h"
#include "control/types.h"
#include "library.h"
#include "mxnet_c_api.h"
#include "program_order.h"
#include "sized_outputs.h"

namespace polyhvd::mxnet {

// What the core has found for an output of an operation, where that does not take it.
struct Spare {
  std::unique_ptr<std::byte[]> data;
  std::int64_t rows = 0;
};

// One collective, shared by MXNet's engine, the core and Python's handle.
struct Op {
  std::string name;
  std::string line;  // in the program order
  std::string where;
  polyhvd_submission submission{};
  std::uint64_t generation = 0;  // of the engine that it was meant for
  ProgramOrder<std::shared_ptr<Op>>::Ticket ticket = 0;

  std::vector<Array> inputs;
  std::vector<Array> outputs;           // empty: in place, or
  std::unique_ptr<SizedOutputs> sized;  // made when the ranks have agreed
  std::vector<Shape> shapes;            // of the inputs, then of the outputs
  std::vector<int> dtypes;              // of the inputs; the outputs have the same
  std::vector<std::int64_t> numbers;

  // Of an allgather whose rows are those of so many ranks in turn, cut as a reducescatter cuts:
  // rows of ranks that have joined are zero. The last output has the ranks that sent some. Else 0.
  std::int64_t members = 0;

  // Of the outputs, where the core asks for memory: written when MXNet runs the operation,
  // then by the thread that completes it.
  std::vector<void*> places;
  std::vector<Spare> spares;  // by output, for what it does not take
  std::string unexpected;     // shape of an output, if one differs

  OnComplete on_complete{};  // from MXNet, when its engine runs the operation
  bool has_run = false;      // likewise

  // Written once, by the thread that completes the operation: the text before the code.
  std::atomic<int> error_code{0};
  std::string error;
  bool was_skipped = false;
  std::atomic<bool> finished{false};

  // Memory for an output that has another shape than the one that was expected.
  void* make_spare(std::size_t output, const Shape& shape) {
    constexpr std::size_t kItemSizeMax = 8;  // of any element type
    std::size_t bytes = kItemSizeMax;
    for (const std::int64_t dim : shape) bytes *= static_cast<std::size_t>(dim);
    if (spares.size() <= output) spares.resize(output + 1);
    spares[output] = {std::make_unique<std::byte[]>(bytes), shape.empty() ? 1 : shape[0]};
    return spares[output].data.get();
  }

  // Puts rows that have come to their places, and zeros between them; whether it could.
  bool fill_absent() {
    if (members == 0 || spares.size() != outputs.size()) return false;
    const Spare& last = spares.back();
    const auto* present = reinterpret_cast<const std::int64_t*>(last.data.get());
    for (std::size_t i = 0; i + 1 < outputs.size(); ++i) {
      if (spares[i].data == nullptr) continue;  // ranks that are absent have no rows of it
      const Shape& shape = shapes[inputs.size() + i];
      std::size_t row_bytes = item_bytes(static_cast<DType>(dtypes[i]));
      for (std::size_t d = 1; d < shape.size(); ++d)
        row_bytes *= static_cast<std::size_t>(shape[d]);
      auto* place = static_cast<std::byte*>(places[i]);
      const std::byte* come = spares[i].data.get();
      for (std::int64_t member = 0; member < members; ++member) {
        const std::int64_t rows = shape[0] / members + (member < shape[0] % members ? 1 : 0);
        const std::size_t bytes = static_cast<std::size_t>(rows) * row_bytes;
        const bool is_there = std::binary_search(present, present + last.rows, member);
        if (is_there) std::memcpy(place, come, bytes);
        if (!is_there) std::memset(place, 0, bytes);
        if (is_there) come += bytes;
        place += bytes;
      }
    }
    return true;
  }
};
using OpPtr = std::shared_ptr<Op>;

}  // namespace polyhvd::mxnet
