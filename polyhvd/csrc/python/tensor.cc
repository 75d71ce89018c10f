#include "python/tensor.h"

#include <pybind11/numpy.h>

#include <iterator>
#include <vector>

#include "python/dlpack.h"

namespace py = pybind11;

namespace polyhvd {
namespace {

struct ExchangeEntry {
  PyTypeObject* type;  // kept alive for good
  const DLPackExchangeAPI* api;
};

// Filled at import of an adapter, under the GIL; types of the process, not of an engine.
std::vector<ExchangeEntry>& exchange_entries() {
  static std::vector<ExchangeEntry> entries;
  return entries;
}

const DLPackExchangeAPI* exchange_for(PyTypeObject* type) {
  for (const ExchangeEntry& entry : exchange_entries()) {
    if (entry.type == type || PyType_IsSubtype(type, entry.type)) return entry.api;
  }
  return nullptr;
}

[[noreturn]] void unsupported(const std::string& dtype) {
  const py::object type = py::module_::import("polyhvd.errors").attr("UnsupportedTypeError");
  const std::string message = "a tensor of " + dtype +
                              " cannot be communicated; cast it to one of uint8, uint16, uint32, "
                              "uint64, int8, int16, int32, int64, float16, bfloat16, float32, "
                              "float64 or bool";
  PyErr_SetString(type.ptr(), message.c_str());
  throw py::error_already_set();
}

[[noreturn]] void not_dense() {
  throw py::buffer_error("the tensor is not dense in row-major order; pass a contiguous copy");
}

DType dtype_of(const DLDataType& type) {
  if (type.lanes == 1) {
    switch (type.code << 8 | type.bits) {
      case 0x108:
        return DType::kUint8;
      case 0x008:
        return DType::kInt8;
      case 0x010:
        return DType::kInt16;
      case 0x020:
        return DType::kInt32;
      case 0x040:
        return DType::kInt64;
      case 0x210:
        return DType::kFloat16;
      case 0x410:
        return DType::kBfloat16;
      case 0x220:
        return DType::kFloat32;
      case 0x240:
        return DType::kFloat64;
      case 0x608:
        return DType::kBool;
      case 0x110:
        return DType::kUint16;
      case 0x120:
        return DType::kUint32;
      case 0x140:
        return DType::kUint64;
      default:
        break;
    }
  }
  unsupported("DLPack type " + std::to_string(type.code) + " of " + std::to_string(type.bits) +
              " bits");
}

TensorView view_of(const DLTensor& t) {
  TensorView view;
  view.dtype = dtype_of(t.dtype);
  view.data = static_cast<char*>(t.data) + t.byte_offset;
  view.shape.assign(t.shape, t.shape + t.ndim);
  if (t.device.device_type == kDlpackCuda) {
    view.device = {DeviceKind::kCuda, t.device.device_id};
  } else if (t.device.device_type != kDlpackCpu) {
    throw py::type_error("the tensor is on a device of DLPack type " +
                         std::to_string(t.device.device_type) +
                         ", expected one on the CPU or an NVIDIA GPU");
  }
  std::int64_t expected = 1;
  const std::int64_t count = element_count(view.shape);
  for (int i = t.ndim - 1; t.strides != nullptr && count > 0 && i >= 0; --i) {
    if (t.shape[i] != 1 && t.strides[i] != expected) not_dense();
    expected *= t.shape[i];
  }
  return view;
}

DType dtype_of(const py::dtype& dtype) {
  // NumPy's type numbers (numpy/ndarraytypes.h); long and long long are both 64 bits here.
  switch (dtype.num()) {
    case 0:
      return DType::kBool;
    case 1:
      return DType::kInt8;
    case 2:
      return DType::kUint8;
    case 3:
      return DType::kInt16;
    case 4:
      return DType::kUint16;
    case 5:
      return DType::kInt32;
    case 6:
      return DType::kUint32;
    case 7:
      return sizeof(long) == 8 ? DType::kInt64 : DType::kInt32;
    case 8:
      return sizeof(long) == 8 ? DType::kUint64 : DType::kUint32;
    case 9:
      return DType::kInt64;
    case 10:
      return DType::kUint64;
    case 11:
      return DType::kFloat32;
    case 12:
      return DType::kFloat64;
    case 23:
      return DType::kFloat16;
    default:
      break;
  }
  const auto name = py::str(dtype.attr("name")).cast<std::string>();
  if (name == "bfloat16") return DType::kBfloat16;  // ml_dtypes
  unsupported(name);
}

TensorView view_of(const py::array& array, bool writable) {
  if (!(array.flags() & py::array::c_style)) not_dense();
  if (array.dtype().byteorder() == '>') unsupported("big-endian numbers");
  if (writable && !array.writeable()) {
    throw py::buffer_error(
        "the array is read-only; pass a writable one, or use the variant that "
        "returns a new array");
  }
  TensorView view;
  view.dtype = dtype_of(array.dtype());
  view.data = const_cast<void*>(array.data());
  view.shape.assign(array.shape(), array.shape() + array.ndim());
  return view;
}

}  // namespace

void register_dlpack_exchange(py::type type, py::capsule capsule) {
  const auto* api = static_cast<const DLPackExchangeAPI*>(capsule.get_pointer());
  if (api->header.version.major != 1) {
    throw py::value_error("DLPack exchange API of version " +
                          std::to_string(api->header.version.major) +
                          "; only version 1 is supported");
  }
  exchange_entries().push_back({reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr()), api});
}

TensorView read_tensor(py::handle object, bool writable) {
  if (const DLPackExchangeAPI* api = exchange_for(Py_TYPE(object.ptr()))) {
    DLTensor tensor;
    if (api->dltensor_from_py_object_no_sync(object.ptr(), &tensor) != 0) {
      throw py::error_already_set();
    }
    return view_of(tensor);
  }
  if (py::isinstance<py::array>(object)) {
    return view_of(py::reinterpret_borrow<py::array>(object), writable);
  }
  if (py::isinstance<TensorRef>(object)) return object.cast<const TensorRef&>().view;
  throw py::type_error("expected a tensor, found " +
                       py::str(py::type::handle_of(object).attr("__name__")).cast<std::string>());
}

std::optional<TensorView> read_on_cpu(py::handle object, bool writable) {
  try {
    TensorView view = read_tensor(object, writable);
    if (view.device.kind == DeviceKind::kCpu) return view;
  } catch (py::error_already_set&) {
  } catch (const py::builtin_exception&) {
  }
  return std::nullopt;
}

Stream stream_of(py::handle tensor, Device device) {
  if (py::isinstance<TensorRef>(tensor)) return tensor.cast<const TensorRef&>().stream;
  const DLPackExchangeAPI* api = exchange_for(Py_TYPE(tensor.ptr()));
  Stream stream = nullptr;
  if (api == nullptr || api->current_work_stream == nullptr) return stream;
  if (api->current_work_stream(kDlpackCuda, device.index, &stream) != 0) {
    throw py::error_already_set();
  }
  return stream;
}

DType parse_dtype(const std::string& name) {
  for (int i = 0; i < kDTypeCount; ++i) {
    if (name_of(static_cast<DType>(i)) == name) return static_cast<DType>(i);
  }
  unsupported(name);
}

py::capsule to_dlpack(const std::shared_ptr<OwnedBuffer>& buffer) {
  struct Managed {
    DLManagedTensor tensor{};
    Shape shape;
    std::shared_ptr<OwnedBuffer> buffer;
  };
  auto managed = std::make_unique<Managed>();
  managed->buffer = buffer;
  managed->shape = buffer->shape();
  static constexpr DLDataType kTypes[] = {
      {1, 8, 1},  {0, 8, 1},  {0, 16, 1}, {0, 32, 1}, {0, 64, 1}, {2, 16, 1}, {4, 16, 1},
      {2, 32, 1}, {2, 64, 1}, {6, 8, 1},  {1, 16, 1}, {1, 32, 1}, {1, 64, 1}};
  static_assert(std::size(kTypes) == kDTypeCount);
  DLTensor& t = managed->tensor.dl_tensor;
  t.data = buffer->data();
  t.device = {kDlpackCpu, 0};
  if (buffer->device().kind == DeviceKind::kCuda) t.device = {kDlpackCuda, buffer->device().index};
  t.ndim = static_cast<std::int32_t>(managed->shape.size());
  t.dtype = kTypes[static_cast<int>(buffer->dtype())];
  t.shape = managed->shape.data();
  managed->tensor.manager_ctx = managed.get();
  managed->tensor.deleter = [](DLManagedTensor* self) {
    delete static_cast<Managed*>(self->manager_ctx);
  };
  // The consumer renames the capsule and deletes the tensor itself.
  PyObject* capsule = PyCapsule_New(&managed.release()->tensor, "dltensor", [](PyObject* unused) {
    if (!PyCapsule_IsValid(unused, "dltensor")) return;
    auto* tensor = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(unused, "dltensor"));
    tensor->deleter(tensor);
  });
  if (capsule == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::capsule>(capsule);
}

}  // namespace polyhvd
