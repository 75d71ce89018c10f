#include "python/copies.h"

#include <pybind11/stl.h>

#include <cstddef>
#include <cstring>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/copies.h"
#include "python/gil.h"
#include "python/tensor.h"

namespace py = pybind11;

namespace polyhvd {
namespace {

// With less than this, letting go of Python's lock costs more than it is good for.
constexpr std::size_t kBytesWithLock = std::size_t{1} << 16;

// Two tensors of one dtype and shape.
struct Pair {
  std::byte* one;  // written only where it was asked for as writable
  const std::byte* other;
  std::size_t bytes;
};

// Nothing where a byte could be written that is not the first one's, or read that is neither's.
std::optional<Pair> pair_of(py::handle one, py::handle other, bool writable) {
  const std::optional<TensorView> first = read_on_cpu(one, writable);
  if (!first) return std::nullopt;
  const std::optional<TensorView> second = read_on_cpu(other, false);
  if (!second || first->dtype != second->dtype || first->shape != second->shape) {
    return std::nullopt;
  }
  const Pair pair{static_cast<std::byte*>(first->data), static_cast<const std::byte*>(second->data),
                  static_cast<std::size_t>(element_count(first->shape)) * item_size(first->dtype)};
  if (pair.bytes != 0 && (pair.one == nullptr || pair.other == nullptr)) return std::nullopt;
  return pair;
}

bool overlap(const Pair& pair) {
  const std::less<const std::byte*> before;
  return before(pair.one, pair.other + pair.bytes) && before(pair.other, pair.one + pair.bytes);
}

class Pairs {
 public:
  Pairs(const py::sequence& ones, const py::sequence& others, bool writable) {
    const std::size_t count = ones.size();
    if (others.size() != count) {
      throw py::value_error(std::to_string(count) + " tensors and " +
                            std::to_string(others.size()) +
                            " others; expected the same number of both");
    }
    held_.reserve(2 * count);
    for (std::size_t i = 0; i < count; ++i) {
      held_.push_back(ones[i]);
      held_.push_back(others[i]);
      pairs_.push_back(pair_of(held_[2 * i], held_[2 * i + 1], writable));
    }
  }

  // In the order of the sequences; nothing for those that are not to be had in memory.
  const std::vector<std::optional<Pair>>& all() const { return pairs_; }

  // Lets go of Python's lock, if that is worth it.
  std::optional<WithoutGil> unlocked() const {
    std::size_t total = 0;
    for (const auto& pair : pairs_) total += pair ? pair->bytes : 0;
    return total > kBytesWithLock ? std::optional<WithoutGil>(std::in_place) : std::nullopt;
  }

 private:
  std::vector<py::object> held_;  // nothing is freed, whatever happens to the sequences meanwhile
  std::vector<std::optional<Pair>> pairs_;
};

std::vector<std::size_t> copy(const py::sequence& targets, const py::sequence& sources) {
  const Pairs pairs(targets, sources, true);
  std::vector<std::size_t> remaining;
  std::vector<host::Piece> pieces;
  for (std::size_t i = 0; i < pairs.all().size(); ++i) {
    const std::optional<Pair>& pair = pairs.all()[i];
    if (pair && !overlap(*pair)) {
      pieces.push_back({pair->one, pair->other, pair->bytes});
    } else {
      remaining.push_back(i);
    }
  }
  const auto unlocked = pairs.unlocked();
  host::copy_pieces(pieces);
  return remaining;
}

std::vector<std::size_t> different(const py::sequence& tensors, const py::sequence& others) {
  const Pairs pairs(tensors, others, false);
  std::vector<std::size_t> found;
  const auto unlocked = pairs.unlocked();
  for (std::size_t i = 0; i < pairs.all().size(); ++i) {
    const std::optional<Pair>& pair = pairs.all()[i];
    const bool is_same =
        pair && (pair->bytes == 0 || std::memcmp(pair->one, pair->other, pair->bytes) == 0);
    if (!is_same) found.push_back(i);
  }
  return found;
}

}  // namespace

void define_copies(py::module_& m) {
  m.def("copy", &copy, py::arg("targets"), py::arg("sources"));
  m.def("different", &different, py::arg("tensors"), py::arg("others"));
}

}  // namespace polyhvd
