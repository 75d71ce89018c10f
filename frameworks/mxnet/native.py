"""Operations of MXNet's engine that are collectives: the ctypes side of native.cc."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, MXNetError
from mxnet.ndarray import NDArray

from polyhvd import context, errors
from polyhvd.adapter import Operation

__all__ = ["Handle", "push", "set_engine"]


class _Call(ctypes.Structure):
    """``polyhvd_mxnet_call`` of native.cc."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("where", ctypes.c_char_p),
        ("kind", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("priority", ctypes.c_int32),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        ("process_set", ctypes.c_uint32),
        ("count", ctypes.c_int32),
        ("inputs", ctypes.c_void_p),
        ("outputs", ctypes.c_void_p),
        ("numbers", ctypes.c_void_p),
        ("number_count", ctypes.c_int32),
    )


def _load() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """The native library: for calls that may block (they release the GIL), and for short ones."""
    paths = [Path(__file__).with_name(f"_native{suffix}") for suffix in EXTENSION_SUFFIXES]
    path = next((p for p in paths if p.exists()), None)
    if path is None:
        raise ImportError(f"polyhvd.mxnet lacks its library {paths[0].name}; reinstall polyhvd")
    library, quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
    library.polyhvd_mxnet_load.restype = ctypes.c_char_p
    missing = library.polyhvd_mxnet_load(_LIB._name.encode())
    if missing is not None:
        raise ImportError(f"mxnet {mx.__version__} lacks {missing.decode()}; polyhvd.mxnet needs 1.9.1")
    library.polyhvd_mxnet_set_engine.argtypes = [ctypes.c_void_p]
    library.polyhvd_mxnet_set_engine.restype = None
    library.polyhvd_mxnet_push.argtypes = [
        ctypes.POINTER(_Call),
        ctypes.POINTER(ctypes.c_int32),
        ctypes.POINTER(ctypes.c_char_p),
    ]
    library.polyhvd_mxnet_push.restype = ctypes.c_void_p
    quick.polyhvd_mxnet_finished.argtypes = [ctypes.c_void_p]
    quick.polyhvd_mxnet_error.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p)]
    quick.polyhvd_mxnet_release.argtypes = [ctypes.c_void_p]
    quick.polyhvd_mxnet_release.restype = None
    return library, quick


_library, _quick = _load()

#: At exit, the time for operations that were pushed but never waited for.
_EXIT_GRACE_S = 10.0


def _finish() -> None:
    """Let the last operations run, which others may need, then end polyhvd.

    MXNet itself waits at exit for all of them, and for ever: also for one that a rank alone has
    asked for. So this comes before.
    """
    if not context.is_initialized():
        return
    with contextlib.suppress(RuntimeError):  # newer Pythons start no thread at exit
        waiting = threading.Thread(target=_wait_for_all, daemon=True)
        waiting.start()
        waiting.join(_EXIT_GRACE_S)
    context.shutdown()


def _wait_for_all() -> None:
    with contextlib.suppress(Exception):  # of an operation whose result nobody has read
        mx.nd.waitall()


atexit.register(_finish)  # after MXNet has registered its own, so that it runs before


def _both(base: type[Exception]) -> type[Exception]:
    """An error of the core that is MXNet's as well, since users of MXNet catch that."""
    return type(base.__name__, (base, MXNetError), {"__doc__": base.__doc__, "__module__": __name__})


# By the codes of csrc/error.h.
_ERRORS = {
    1: _both(errors.InvalidArgumentError),
    2: _both(errors.RankMismatchError),
    3: _both(errors.PeerLostError),
    4: _both(errors.PeerDepartedError),
    5: _both(errors.ShutdownError),
    7: _both(errors.TransferTimeoutError),
}
_INTERNAL_ERROR = _both(errors.HorovodInternalError)


def _error(code: int, message: ctypes.c_char_p) -> Exception:
    return _ERRORS.get(code, _INTERNAL_ERROR)((message.value or b"").decode())


class Handle:
    """An operation that MXNet's engine has been given; see :class:`polyhvd.adapter.Handle`.

    It may be dropped at any time: the operation goes on, and reads of the arrays wait for it.
    """

    __slots__ = ("_arrays", "_error", "_native", "finish", "result", "slot")

    def __init__(self, native: int, arrays: Sequence[NDArray]) -> None:
        self._native = native
        self._arrays = arrays
        self._error: Exception | None = None
        self.result: Any = arrays
        self.finish = None
        self.slot: Any = None

    def __del__(self, release: Any = _quick.polyhvd_mxnet_release) -> None:
        release(self._native)  # an argument: at exit the module may be gone

    def done(self) -> bool:
        """Whether ``wait()`` would return at once."""
        return not self._arrays or bool(_quick.polyhvd_mxnet_finished(self._native))

    def wait(self) -> None:
        """Return when the results are there; raise what the operation failed with, each time."""
        for array in self._arrays:
            try:
                array.wait_to_read()
            except MXNetError as error:
                self._error = self._error or error
        self._arrays = ()  # later operations on them are not ours
        message = ctypes.c_char_p()
        code = _quick.polyhvd_mxnet_error(self._native, message)
        if code:
            self._error = _error(code, message)
        if self._error is not None:
            raise self._error


def _caller() -> str:
    """The line of the user's code that made the call, such as ``train.py:88``, for error messages."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("polyhvd.", "mxnet.")):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def push(operation: Operation, tensors: Sequence[NDArray], out: Sequence[NDArray]) -> Handle:
    """Give a collective to MXNet's engine, which runs it once the arrays are ready."""
    array_type = ctypes.c_void_p * len(tensors)
    inputs = array_type(*[t.handle.value for t in tensors])
    outputs = inputs if out is tensors else array_type(*[t.handle.value for t in out])
    numbers = (ctypes.c_int64 * len(operation.numbers))(*operation.numbers)
    call = _Call(
        operation.name.encode(),
        _caller().encode(),
        operation.kind,
        operation.op,
        operation.root,
        max(-(2**31), min(operation.priority, 2**31 - 1)),
        operation.prescale,
        operation.postscale,
        operation.process_set,
        len(tensors),
        ctypes.addressof(inputs),
        ctypes.addressof(outputs),
        ctypes.addressof(numbers),
        len(numbers),
    )
    code = ctypes.c_int32()
    message = ctypes.c_char_p()
    native = _library.polyhvd_mxnet_push(call, code, message)
    if native is None:
        raise _error(code.value, message)
    return Handle(native, out)


def set_engine(table: int) -> None:
    """Submit to the engine with this C table from now on; 0: to none."""
    _library.polyhvd_mxnet_set_engine(table or None)
