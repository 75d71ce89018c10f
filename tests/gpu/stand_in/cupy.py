"""A test double of CuPy for machines without a GPU: arrays in the memory of the CUDA driver's stand-in.

It has the names of CuPy that polyhvd and its tests use, no more; test_cupy_names.py holds them against
CuPy itself. What an array is filled with travels on the current stream, and reading one waits for it.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["array", "asarray", "asnumpy", "cuda", "empty", "empty_like", "ndarray"]

_driver = ctypes.CDLL(os.environ["TEST_CUDA_LIBRARY"])
_thread = threading.local()


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver, name)(*arguments)
    if code != 0:
        raise RuntimeError(f"{name}: error {code}")


_call("cuInit", 0)
_context = ctypes.c_void_p()
_call("cuDevicePrimaryCtxRetain", ctypes.byref(_context), 0)


def _on_device(name: str, *arguments: Any) -> None:
    _call("cuCtxSetCurrent", _context)
    _call(name, *arguments)


class _Stream:
    """``cupy.cuda.Stream``; a context manager that makes it the thread's current one."""

    def __init__(self, non_blocking: bool = False, ptr: int | None = None) -> None:
        self.ptr = ptr
        if ptr is None:
            handle = ctypes.c_void_p()
            _on_device("cuStreamCreate", ctypes.byref(handle), int(non_blocking))
            self.ptr = handle.value or 0

    def __enter__(self) -> _Stream:
        self._before = _current_stream()
        _thread.stream = self
        return self

    def __exit__(self, *_: object) -> None:
        _thread.stream = self._before

    def synchronize(self) -> None:
        _on_device("cuStreamSynchronize", ctypes.c_void_p(self.ptr))


_default = _Stream(ptr=0)


def _current_stream() -> _Stream:
    stream: _Stream = getattr(_thread, "stream", _default)
    return stream


class _Memory:
    """``cupy.cuda.Memory``: freed with the last pointer into it."""

    def __init__(self, size: int) -> None:
        address = ctypes.c_uint64(0)
        if size > 0:
            _on_device("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self.ptr, self.size, self.device_id = address.value, size, 0

    def __del__(self) -> None:
        if self.ptr:
            _on_device("cuMemFree_v2", ctypes.c_uint64(self.ptr))


class _UnownedMemory:
    """``cupy.cuda.UnownedMemory``: somebody else's."""

    def __init__(self, ptr: int, size: int, owner: object, device_id: int = -1) -> None:
        self.ptr, self.size, self.device_id, self._owner = ptr, size, device_id, owner


class _MemoryPointer:
    def __init__(self, mem: Any, offset: int) -> None:
        self.mem, self.ptr, self.device_id = mem, mem.ptr + offset, mem.device_id


class ndarray:
    """``cupy.ndarray``: strided, but always a view of a whole allocation."""

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any = float,
        memptr: _MemoryPointer | None = None,
        strides: Sequence[int] | None = None,
        order: str = "C",
    ) -> None:
        assert order == "C", "not needed"
        self.dtype = np.dtype(dtype)
        self.shape = tuple(int(n) for n in shape)
        self.size = int(np.prod(self.shape))
        self.nbytes = self.size * self.dtype.itemsize
        self.strides = tuple(strides) if strides is not None else _dense_strides(self.shape, self.dtype)
        self.data = memptr or _MemoryPointer(_Memory(self.nbytes), 0)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def flags(self) -> Any:
        dense = _dense_strides(self.shape, self.dtype)
        pairs = zip(self.shape, self.strides, dense, strict=True)
        return SimpleNamespace(c_contiguous=self.size == 0 or all(n == 1 or a == b for n, a, b in pairs))

    def transpose(self) -> ndarray:
        return ndarray(self.shape[::-1], self.dtype, self.data, self.strides[::-1])

    def astype(self, dtype: Any, copy: bool = True) -> ndarray:
        if self.dtype == np.dtype(dtype) and not copy:
            return self
        return array(asnumpy(self).astype(dtype))

    def _write(self, values: np.ndarray[Any, Any]) -> None:
        if self.size == 0:
            return
        _current_stream().synchronize()
        whole = np.empty(self.nbytes, np.uint8)
        np.ndarray(self.shape, self.dtype, whole.data, strides=self.strides)[...] = values
        self._source = whole  # until the stream has read it
        pointer = ctypes.c_void_p(whole.ctypes.data)
        stream = ctypes.c_void_p(_current_stream().ptr)
        _on_device(
            "cuMemcpyHtoDAsync_v2",
            ctypes.c_uint64(self.data.ptr),
            pointer,
            ctypes.c_size_t(self.nbytes),
            stream,
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        assert key is Ellipsis, "not needed"
        self._write(asnumpy(value) if isinstance(value, ndarray) else np.asarray(value))


def _dense_strides(shape: Sequence[int], dtype: np.dtype[Any]) -> tuple[int, ...]:
    strides, step = [], dtype.itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))


def empty(shape: Sequence[int], dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def empty_like(prototype: ndarray, dtype: Any = None, order: str = "K") -> ndarray:
    return ndarray(prototype.shape, prototype.dtype if dtype is None else dtype)


def array(values: Any, dtype: Any = None, copy: bool = True, order: str = "K") -> ndarray:
    host = asnumpy(values) if isinstance(values, ndarray) else np.asarray(values)
    made = ndarray(host.shape, host.dtype if dtype is None else dtype)
    made._write(host)
    return made


def asarray(values: Any, dtype: Any = None) -> ndarray:
    return values if isinstance(values, ndarray) and dtype is None else array(values, dtype)


def asnumpy(values: ndarray) -> np.ndarray[Any, Any]:
    """A copy on the host, of what the current stream has made of it."""
    whole = np.empty(values.nbytes, np.uint8)
    if values.size > 0:
        stream = _current_stream()
        _on_device(
            "cuMemcpyDtoHAsync_v2",
            ctypes.c_void_p(whole.ctypes.data),
            ctypes.c_uint64(values.data.ptr),
            ctypes.c_size_t(values.nbytes),
            ctypes.c_void_p(stream.ptr),
        )
        stream.synchronize()
    view: np.ndarray[Any, Any] = np.ndarray(values.shape, values.dtype, whole.data, strides=values.strides)
    return view.copy()


_get: Callable[[], _Stream] = _current_stream
cuda = SimpleNamespace(
    MemoryPointer=_MemoryPointer, Stream=_Stream, UnownedMemory=_UnownedMemory, get_current_stream=_get
)
