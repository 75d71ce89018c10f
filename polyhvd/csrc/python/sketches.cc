#include "python/sketches.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "host/sketch.h"
#include "python/gil.h"
#include "python/tensor.h"

namespace py = pybind11;

namespace polyhvd {
namespace {

using host::kSketchColumns;
using host::Sketch;

// The norm, how many are not finite, and the columns.
constexpr std::size_t kRow = 2 + kSketchColumns;
// With less than this, letting go of Python's lock costs more than it is good for.
constexpr std::int64_t kBytesWithLock = std::int64_t{1} << 16;

using Matrix = py::array_t<double, py::array::c_style>;

struct Job {
  TensorView view;
  double* row;
  std::uint64_t begin = 0;
  double factor = 1;
  const std::byte* less = nullptr;
  std::byte* copy = nullptr;

  std::int64_t bytes() const {
    return element_count(view.shape) * static_cast<std::int64_t>(item_size(view.dtype));
  }
};

// The item for the tensor at a place; null if there is none.
py::object item(const py::object& list, std::size_t place) {
  if (list.is_none()) return py::none();
  return list.cast<py::sequence>()[place];
}

// What lies beside the tensor's elements; false: it is not as long as they are.
bool beside(const py::object& array, bool writable, std::int64_t bytes, std::byte*& found) {
  if (array.is_none()) return true;
  const TensorView view = read_tensor(array, writable);
  if (view.device.kind != DeviceKind::kCpu) return false;
  if (element_count(view.shape) * static_cast<std::int64_t>(item_size(view.dtype)) != bytes) {
    return false;
  }
  found = static_cast<std::byte*>(view.data);
  return true;
}

void run(const Job& job) {
  const Sketch made = host::sketch_of(job.view.dtype, static_cast<const std::byte*>(job.view.data),
                                      static_cast<std::size_t>(element_count(job.view.shape)),
                                      job.begin, job.less, job.copy);
  job.row[0] = std::sqrt(made.square) * std::abs(job.factor);
  job.row[1] = static_cast<double>(made.not_finite);
  for (std::size_t i = 0; i < kSketchColumns; ++i) job.row[2 + i] = made.columns[i] * job.factor;
}

py::list sketch(const py::sequence& tensors, Matrix rows, const std::vector<std::size_t>& places,
                const py::object& begins, const py::object& factors, const py::object& less,
                const py::object& copies) {
  const std::size_t count = tensors.size();
  for (const py::object* list : {&begins, &factors, &less, &copies}) {
    if (!list->is_none() && py::len(*list) != count) throw py::value_error("one for each tensor");
  }
  if (places.size() != count) throw py::value_error("one place for each tensor");
  if (rows.ndim() != 2 || rows.shape(1) != static_cast<py::ssize_t>(kRow)) {
    throw py::value_error("rows have " + std::to_string(kRow) + " numbers each");
  }
  double* const first = rows.mutable_data();
  py::list described;
  std::vector<Job> jobs;
  jobs.reserve(count);
  std::int64_t total = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (places[i] >= static_cast<std::size_t>(rows.shape(0))) throw py::index_error("no such row");
    const std::optional<TensorView> view = read_on_cpu(tensors[i], false);
    if (!view) {
      described.append(py::none());
      continue;
    }
    Job job{.view = *view, .row = first + places[i] * kRow};
    std::byte* other = nullptr;
    if (!beside(item(less, i), false, job.bytes(), other) ||
        !beside(item(copies, i), true, job.bytes(), job.copy)) {
      described.append(py::none());
      continue;
    }
    job.less = other;
    if (!begins.is_none()) job.begin = item(begins, i).cast<std::uint64_t>();
    if (!factors.is_none()) job.factor = item(factors, i).cast<double>();
    py::tuple shape(job.view.shape.size());
    for (std::size_t axis = 0; axis < job.view.shape.size(); ++axis) {
      shape[axis] = py::int_(job.view.shape[axis]);
    }
    described.append(py::make_tuple(std::string(name_of(job.view.dtype)), std::move(shape)));
    total += job.bytes();
    jobs.push_back(std::move(job));
  }
  std::optional<WithoutGil> without_gil;
  if (total > kBytesWithLock) without_gil.emplace();
  for (const Job& job : jobs) run(job);
  return described;
}

}  // namespace

void define_sketches(py::module_& m) {
  m.attr("SKETCH_NUMBERS") = kRow;
  m.def("sketch", &sketch, py::arg("tensors"), py::arg("rows").noconvert(), py::arg("places"),
        py::kw_only(), py::arg("begins") = py::none(), py::arg("factors") = py::none(),
        py::arg("less") = py::none(), py::arg("copies") = py::none());
}

}  // namespace polyhvd
