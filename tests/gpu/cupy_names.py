"""Run by test_cupy_names.py: arrays of CuPy over memory of the host, as no GPU has to be there."""

from __future__ import annotations

import ast
import contextlib
import sys
from functools import reduce
from pathlib import Path

import cupy
import numpy as np

STAND_IN = Path(__file__).with_name("stand_in") / "cupy.py"
#: Of arrays, their memory and their flags.
ATTRIBUTES = ["data.ptr", "data.device_id", "flags.c_contiguous", "dtype.name"]
ATTRIBUTES += ["shape", "astype", "transpose"]


def array_over(host: np.ndarray) -> cupy.ndarray:
    memory = cupy.cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, 0)
    return cupy.ndarray(host.shape, host.dtype, cupy.cuda.MemoryPointer(memory, 0), strides=host.strides)


def read_and_make() -> None:
    from polyhvd.cupy.adapter import _array, _reference

    host = np.arange(12, dtype=np.float32).reshape(3, 4)
    dense = array_over(host)
    for name in ATTRIBUTES:
        reduce(getattr, name.split("."), dense)
    assert dense.data.ptr == host.ctypes.data
    _reference(dense, stream=0)
    with contextlib.suppress(BufferError):
        _reference(array_over(host.T), stream=0)
        raise AssertionError("a transposed array passed for dense")

    class Buffer:
        shape, dtype, address, gpu = (3, 4), "float32", host.ctypes.data, 0

    made = _array(Buffer())
    assert (made.shape, made.dtype, made.data.ptr) == ((3, 4), np.float32, host.ctypes.data)
    assert made.flags.c_contiguous
    assert made.data.device_id == 0


def compare_names() -> None:
    (exported,) = (
        node.value
        for node in ast.parse(STAND_IN.read_text()).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    names = [*ast.literal_eval(exported), "cuda.MemoryPointer", "cuda.Stream", "cuda.UnownedMemory"]
    for name in [*names, "cuda.get_current_stream", "cuda.Device"]:
        reduce(getattr, name.split("."), cupy)


{"arrays": read_and_make, "names": compare_names}[sys.argv[1]]()
print(f"{sys.argv[1]} compared")
