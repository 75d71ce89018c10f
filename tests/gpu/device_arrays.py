"""Arrays on a GPU for tests, by the CUDA driver alone: the stand-in, or a real one.

Everything is given to a stream and comes when it comes: from_numpy() does not wait, and to_numpy()
reads on the current stream, right behind what that has to wait for.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyhvd import _core

__all__ = ["LIBRARY", "STAND_IN", "DeviceArray", "Stream", "cuda", "current_stream", "device", "use_stream"]

Array = np.ndarray[Any, Any]

STAND_IN = Path(__file__).resolve().parents[2] / "build" / "gpu" / "libcuda.so.1"
#: In the environment of a rank: another library, such as libcuda.so.1 itself where there is a GPU.
LIBRARY = "TEST_CUDA_LIBRARY"

_NON_BLOCKING = 1


class _Driver:
    """The driver's functions by name, each checked; with the context of one GPU."""

    def __init__(self) -> None:
        # In the process before polyhvd looks for it: the loader then finds this one by its name.
        self._library = ctypes.CDLL(os.environ.get(LIBRARY, str(STAND_IN)))
        self.call("cuInit", 0)
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        self.device = int(os.environ.get("POLYHVD_LOCAL_RANK", "0")) % count.value
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise RuntimeError(f"{name}: error {code}")

    def on(self, device: int, name: str, *arguments: Any) -> None:
        """A call in the context of a GPU."""
        if device not in self._contexts:
            context, ordinal = ctypes.c_void_p(), ctypes.c_int()
            self.call("cuDeviceGet", ctypes.byref(ordinal), device)
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ordinal)
            self._contexts[device] = context
        self.call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            self.call(name, *arguments)
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @contextlib.contextmanager
    def busy(self, stream: Stream, task: Callable[[], None]) -> Iterator[None]:
        """Give the stand-in's stream a task that may wait; it has to end before this does."""
        kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: task())
        self.on(stream.device, "polyhvd_stand_in_enqueue", ctypes.c_void_p(stream.handle), kept, None)
        yield
        stream.synchronize()

    def counted(self, name: str) -> int:
        """How often the stand-in was called by this name."""
        function = self._library.polyhvd_stand_in_calls
        function.restype = ctypes.c_long
        return int(function(name.encode()))


@functools.cache
def cuda() -> _Driver:
    """The driver; not touched before it is asked for."""
    return _Driver()


def device() -> int:
    """The GPU that this rank works on."""
    return cuda().device


class Stream:
    """A stream that waits for no other one; Stream(0) is the default one."""

    def __init__(self, handle: int | None = None, on: int | None = None) -> None:
        self.device = device() if on is None else on
        if handle is None:
            made = ctypes.c_void_p()
            cuda().on(self.device, "cuStreamCreateWithPriority", ctypes.byref(made), _NON_BLOCKING, 0)
            handle = made.value or 0
        self.handle = handle

    def synchronize(self) -> None:
        """Wait until it has done everything."""
        cuda().on(self.device, "cuStreamSynchronize", ctypes.c_void_p(self.handle))


_current: list[Stream] = []


def current_stream() -> Stream:
    """The one that arrays are made, read and handed over on."""
    if not _current:
        _current.append(Stream())
    return _current[-1]


@contextlib.contextmanager
def use_stream(stream: Stream) -> Iterator[Stream]:
    """Make a stream the current one."""
    current_stream()
    _current.append(stream)
    try:
        yield stream
    finally:
        _current.pop()


class _Memory:
    """An allocation on a GPU."""

    def __init__(self, nbytes: int, on: int) -> None:
        self.device = on
        self.address = 0
        if nbytes > 0:
            made = ctypes.c_ulonglong()
            cuda().on(on, "cuMemAlloc_v2", ctypes.byref(made), ctypes.c_size_t(nbytes))
            self.address = made.value

    def __del__(self) -> None:
        if self.address:
            cuda().on(self.device, "cuMemFree_v2", ctypes.c_ulonglong(self.address))


class DeviceArray:
    """A dense array on a GPU."""

    def __init__(
        self, address: int, shape: Sequence[int], dtype: np.dtype[Any], owner: object, on: int
    ) -> None:
        self.address, self.shape, self.dtype, self.owner = address, tuple(shape), dtype, owner
        self.device = on

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: np.dtype[Any], on: int | None = None) -> DeviceArray:
        """An array without values."""
        on = device() if on is None else on
        memory = _Memory(math.prod(shape) * dtype.itemsize, on)
        return cls(memory.address, shape, dtype, memory, on)

    @classmethod
    def from_numpy(cls, array: Array, on: int | None = None) -> DeviceArray:
        """An array that has these values once the current stream has got there."""
        made = cls.empty(array.shape, array.dtype, on)
        made.fill(array)
        return made

    @classmethod
    def from_buffer(cls, buffer: _core.Buffer, dtype: np.dtype[Any]) -> DeviceArray:
        """What the core has allocated."""
        kind, on = buffer.__dlpack_device__()
        assert kind == 2, f"device {kind}, not CUDA"
        capsule = buffer.__dlpack__()
        get = ctypes.pythonapi.PyCapsule_GetPointer
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        data = ctypes.c_void_p.from_address(get(capsule, b"dltensor"))  # the first field
        return cls(data.value or 0, buffer.shape, dtype, capsule, on)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def fill(self, array: Array) -> None:
        """Give new values to the current stream."""
        assert (array.shape, array.dtype) == (self.shape, self.dtype)
        if self.nbytes:
            source = np.ascontiguousarray(array)
            self._copy("cuMemcpyHtoDAsync_v2", self._pointer, ctypes.c_void_p(source.ctypes.data))

    def to_numpy(self) -> Array:
        """The values, as the current stream finds them."""
        values = np.empty(self.shape, self.dtype)
        if self.nbytes:
            self._copy("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(values.ctypes.data), self._pointer)
            current_stream().synchronize()
        return values

    def ref(self) -> _core.TensorRef:
        """As the core takes it, made on the current stream."""
        stream = current_stream().handle
        return _core.TensorRef(self.address, self.shape, self.dtype.name, self, self.device, stream)

    @property
    def _pointer(self) -> ctypes.c_ulonglong:
        return ctypes.c_ulonglong(self.address)

    def _copy(self, name: str, to: Any, source: Any) -> None:
        stream = ctypes.c_void_p(current_stream().handle)
        cuda().on(self.device, name, to, source, ctypes.c_size_t(self.nbytes), stream)
