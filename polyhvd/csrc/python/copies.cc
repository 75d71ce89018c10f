#include "python/copies.h"

#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "host/copies.h"
#include "python/gil.h"
#include "python/tensor.h"

namespace py = pybind11;

namespace polyhvd {
namespace {

// With less than this, letting go of Python's lock costs more than it is good for.
constexpr std::size_t kBytesWithLock = std::size_t{1} << 16;

bool overlaps(const host::Piece& piece) {
  const std::less<const std::byte*> before;
  return before(piece.to, piece.from + piece.bytes) && before(piece.from, piece.to + piece.bytes);
}

// Nothing where a byte could be written that is not the target's, or read that is not the source's.
std::optional<host::Piece> piece_of(py::handle target, py::handle source) {
  const std::optional<TensorView> to = read_on_cpu(target, true);
  if (!to) return std::nullopt;
  const std::optional<TensorView> from = read_on_cpu(source, false);
  if (!from || from->dtype != to->dtype || from->shape != to->shape) return std::nullopt;
  const host::Piece piece{
      .to = static_cast<std::byte*>(to->data),
      .from = static_cast<const std::byte*>(from->data),
      .bytes = static_cast<std::size_t>(element_count(to->shape)) * item_size(to->dtype)};
  if (piece.bytes != 0 && (piece.to == nullptr || piece.from == nullptr)) return std::nullopt;
  return overlaps(piece) ? std::nullopt : std::optional(piece);
}

std::vector<std::size_t> copy(const py::sequence& targets, const py::sequence& sources) {
  const std::size_t count = targets.size();
  if (sources.size() != count) {
    throw py::value_error("there are " + std::to_string(count) + " targets and " +
                          std::to_string(sources.size()) + " sources; expected as many");
  }
  std::vector<std::size_t> left;
  std::vector<host::Piece> pieces;
  std::vector<py::object> held;  // nothing is freed, whatever happens to the sequences meanwhile
  pieces.reserve(count);
  held.reserve(2 * count);
  std::size_t total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    py::object target = targets[i];
    py::object source = sources[i];
    const std::optional<host::Piece> piece = piece_of(target, source);
    if (!piece) {
      left.push_back(i);
      continue;
    }
    total += piece->bytes;
    pieces.push_back(*piece);
    held.push_back(std::move(target));
    held.push_back(std::move(source));
  }
  std::optional<WithoutGil> without_gil;
  if (total > kBytesWithLock) without_gil.emplace();
  host::copy_pieces(pieces);
  return left;
}

}  // namespace

void define_copies(py::module_& m) {
  m.def("copy", &copy, py::arg("targets"), py::arg("sources"));
}

}  // namespace polyhvd
