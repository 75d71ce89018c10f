// Python objects as tensors: NumPy arrays, tensors of types that offer DLPack's C
// exchange API, and addresses given by an adapter. The GIL is held throughout.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>
#include <string>

#include "control/operation.h"
#include "control/types.h"

namespace polyhvd {

// A dense tensor given by address.
struct TensorRef {
  TensorView view;
  pybind11::object owner;
  Stream stream = nullptr;
};

void register_dlpack_exchange(pybind11::type type, pybind11::capsule capsule);

// Throws BufferError when the object is not dense, TypeError when it is no
// tensor or has an element type that no operation knows.
TensorView read_tensor(pybind11::handle object, bool writable);

// Nothing for what cannot be had where it lies: another device, gaps, no tensor, read-only.
std::optional<TensorView> read_on_cpu(pybind11::handle object, bool writable);

// The stream that its framework gives work to at the moment, or that of a TensorRef. The
// default stream if the framework does not have it.
Stream stream_of(pybind11::handle tensor, Device device);

DType parse_dtype(const std::string& name);

// A DLPack capsule that shares ownership of the buffer.
pybind11::capsule to_dlpack(const std::shared_ptr<OwnedBuffer>& buffer);

}  // namespace polyhvd
