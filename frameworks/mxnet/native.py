"""Operations of MXNet's engine that are collectives: the ctypes side of native.cc."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mxnet as mx
from mxnet.base import _LIB, MXNetError, NDArrayHandle
from mxnet.ndarray import NDArray
from polyhvd.mxnet import errors
from polyhvd.mxnet.names import turn_of

from polyhvd import _core, shutdown
from polyhvd.collectives.adapter import Operation, OpKind

__all__ = [
    "Handle",
    "counters",
    "drain",
    "failure_in",
    "forget",
    "lock",
    "push",
    "push_in_place",
    "push_sized",
    "read",
    "set_engine",
    "settle",
    "unlock",
]


class _Manner(ctypes.Structure):
    """``polyhvd_mxnet_manner`` of native.cc."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("op", ctypes.c_int32),
        ("root", ctypes.c_int32),
        ("process_set", ctypes.c_uint32),
        ("prescale", ctypes.c_double),
        ("postscale", ctypes.c_double),
        ("generation", ctypes.c_uint64),
    )


def _load() -> tuple[ctypes.CDLL, ctypes.PyDLL]:
    """The native library: for calls that may block (they release the GIL), and for short ones."""
    path = Path(__file__).with_name("_native.so")
    if not path.exists():
        raise ImportError(f"polyhvd.mxnet lacks its library {path.name}; reinstall polyhvd")
    library, quick = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
    library.polyhvd_mxnet_load.restype = ctypes.c_char_p
    missing = library.polyhvd_mxnet_load(_LIB._name.encode())
    if missing is not None:
        raise ImportError(f"mxnet {mx.__version__} lacks {missing.decode()}; polyhvd.mxnet needs 1.9.1")
    library.polyhvd_mxnet_set_engine.argtypes = [ctypes.c_void_p]
    # No argtypes: bytes, pointers and numbers that fit an int are faster as they are.
    library.polyhvd_mxnet_push.restype = ctypes.c_void_p
    library.polyhvd_mxnet_await_sizes.argtypes = [ctypes.c_void_p, ctypes.c_double]
    library.polyhvd_mxnet_take.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    quick.polyhvd_mxnet_failure.argtypes = [ctypes.POINTER(ctypes.c_char_p)]
    quick.polyhvd_mxnet_finished.argtypes = [ctypes.c_void_p]
    quick.polyhvd_mxnet_succeeded.argtypes = [ctypes.c_void_p]
    quick.polyhvd_mxnet_error.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_char_p)]
    quick.polyhvd_mxnet_release.argtypes = [ctypes.c_void_p]
    quick.polyhvd_mxnet_release.restype = None
    quick.polyhvd_mxnet_watch.restype = ctypes.POINTER(ctypes.c_int64)
    quick.polyhvd_mxnet_failure_in.argtypes = [ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p)]
    library.polyhvd_mxnet_settle.restype = None
    library.polyhvd_mxnet_lock.restype = None
    quick.polyhvd_mxnet_unlock.restype = None
    library.polyhvd_mxnet_drain.argtypes = [ctypes.c_double]
    quick.polyhvd_mxnet_forget.restype = None
    return library, quick


_library, _quick = _load()
_push = _library.polyhvd_mxnet_push  # read once, as it is called for each gradient of a step
_succeeded = _quick.polyhvd_mxnet_succeeded

#: Modules whose lines are never reported as the place of a call.
_LIBRARIES = ("polyhvd.", "mxnet.")

#: At exit, the time for what MXNet still computes.
_EXIT_GRACE_S = 10.0
_wait_for_all = _LIB.MXNDArrayWaitAll  # as MXNet has it: returns a status


def _finish() -> None:
    """Let the last operations run, which others may need, then end polyhvd.

    MXNet itself waits at exit for all of them without a limit, even for a collective that only one rank has
    called. So this comes before.
    """
    shutdown()
    # MXNet would print errors that were never read.
    with contextlib.suppress(RuntimeError):  # newer Pythons start no thread at exit
        waiting = threading.Thread(target=_wait_for_all, daemon=True)
        waiting.start()
        waiting.join(_EXIT_GRACE_S)


atexit.register(_finish)  # after MXNet has registered its own, so that it runs before


_ERRORS = errors.by_code()
_SIZES_KNOWN = 1
_INTERRUPTIBLE_S = 0.1  # for Ctrl-C, which Python acts upon between calls
_SKIPPED = 100  # added to codes of operations that were not done, as an array held the error of another
_INTERNAL_ERROR = errors.HorovodInternalError


def _error(code: int, message: ctypes.c_char_p) -> Exception:
    return _ERRORS.get(code, _INTERNAL_ERROR)((message.value or b"").decode())


class Handle:
    """An operation that MXNet's engine has been given; see :class:`polyhvd.collectives.adapter.Handle`.

    It may be dropped at any time: the operation goes on, and reads of the arrays wait for it.
    """

    __slots__ = ("_arrays", "_error", "_native", "finish", "result", "slot")

    def __init__(self, native: int, arrays: Sequence[NDArray], result: Any) -> None:
        self._native = native
        self._arrays = arrays
        self._error: Exception | None = None
        self.result = result
        self.finish: Callable[[Any], Any] | None = None
        self.slot: Any = None

    def __del__(self, release: Any = _quick.polyhvd_mxnet_release) -> None:
        release(self._native)  # an argument: at exit the module may be gone

    def done(self) -> bool:
        """Return whether ``wait()`` would return at once."""
        return not self._arrays or bool(_quick.polyhvd_mxnet_finished(self._native))

    def wait(self) -> None:
        """Return when the results are there; raise what the operation failed with, each time."""
        if not _succeeded(self._native):
            self._await()
        self._arrays = ()  # later operations on them are not ours

    def _await(self) -> None:
        arrays, self._arrays = self._arrays, ()
        for array in arrays:
            try:
                array.wait_to_read()
            except MXNetError as error:
                self._error = self._error or error
        if self._error is None or not self._was_skipped():
            self._error = self.failure() or self._error
        if self._error is not None:
            raise self._error

    def failure(self) -> Exception | None:
        """The error of the operation so far, or that it was skipped because another has failed."""
        message = ctypes.c_char_p()
        code = _quick.polyhvd_mxnet_error(self._native, message)
        return _error(code % _SKIPPED, message) if code else None

    def _was_skipped(self) -> bool:
        return _quick.polyhvd_mxnet_error(self._native, ctypes.c_char_p()) >= _SKIPPED

    def forget_arrays(self) -> None:
        """Keep nothing alive but how the operation ended."""
        self._arrays = ()
        self.result = None


@functools.lru_cache(maxsize=256)
def _manner(
    kind: int, op: int, root: int, process_set: int, prescale: float, postscale: float, generation: int = 0
) -> Any:
    """A pointer to a :class:`_Manner`, which it keeps alive. A program has few, and one for many calls."""
    return ctypes.byref(_Manner(kind, op, root, process_set, prescale, postscale, generation))


@functools.lru_cache(maxsize=256)
def _place(path: str, line: int) -> bytes:
    return f"{path.rpartition('/')[2]}:{line}".encode("utf-8", "backslashreplace")


def _caller() -> bytes:
    """The line of the user's code that made the call, such as ``train.py:88``, for error messages."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_LIBRARIES):
            return _place(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return b""


def _priority(priority: int) -> int:
    """Return the priority within the range of MXNet's type, a C int; a model may use larger numbers."""
    return max(-(2**31), min(operator.index(priority), 2**31 - 1))


def _pushed(native: int | None, arrays: Sequence[NDArray], result: Any) -> Handle:
    if native is None:
        message = ctypes.c_char_p()
        code = _quick.polyhvd_mxnet_failure(message)
        raise _error(code, message)
    return Handle(native, arrays, result)


def push(operation: Operation, tensors: Sequence[NDArray], out: Sequence[NDArray]) -> Handle:
    """Give a collective to MXNet's engine, which runs it once the arrays are ready."""
    return _pushed(_push_native(operation, tensors, out), out, out)


def push_sized(operation: Operation, tensors: Sequence[NDArray]) -> tuple[Handle, Sequence[int]]:
    """:func:`push` for outputs whose sizes the ranks agree on; waits until these are known.

    Returns:
        The handle, whose result is the new arrays, which may not be written yet; and the rows that the core
        reports, as ``sized`` in c_api.h has them.

    Raises:
        Exception: what the operation has failed with before the sizes were known.
    """
    handle = _pushed(_push_native(operation, tensors, None), (), None)
    while not (state := _library.polyhvd_mxnet_await_sizes(handle._native, _INTERRUPTIBLE_S)):
        pass
    made = (ctypes.c_void_p * len(tensors))()
    rows = ctypes.POINTER(ctypes.c_int64)()
    if state != _SIZES_KNOWN or not _library.polyhvd_mxnet_take(handle._native, made, ctypes.byref(rows)):
        if handle._was_skipped():
            for tensor in tensors:  # raises the error, and takes it from what else has it, as any reader does
                tensor.wait_to_read()
        raise handle.failure() or _INTERNAL_ERROR("MXNet has not taken the results of a collective")
    arrays = [type(t)(NDArrayHandle(array)) for t, array in zip(tensors, made, strict=True)]
    handle._arrays = handle.result = arrays
    members = len(operation.world.process_sets()[operation.process_set])
    return handle, rows[: members * (len(tensors) if operation.kind == OpKind.ALLGATHER else 1)]


def _push_native(
    operation: Operation, tensors: Sequence[NDArray], out: Sequence[NDArray] | None
) -> int | None:
    array_type = ctypes.c_void_p * len(tensors)
    inputs = array_type(*[t.handle.value for t in tensors])
    outputs: Any = None
    if out is not None:
        outputs = inputs if out is tensors else array_type(*[t.handle.value for t in out])
    numbers = operation.numbers
    name = operation.name or ""  # never empty: the adapter has counted a call without one
    manner = _manner(
        operation.kind,
        operation.op,
        operation.root,
        operation.process_set,
        float(operation.prescale),
        float(operation.postscale),
        operation.generation or operation.world.placement.generation,
    )
    native: int | None = _push(
        manner,
        name.encode(),
        turn_of(name),
        _caller(),
        _priority(operation.priority),
        len(tensors),
        inputs,
        outputs,
        (ctypes.c_int64 * len(numbers))(*numbers) if numbers else None,
        len(numbers),
    )
    return native


def push_in_place(
    kind: int,
    name: str,
    tensor: NDArray,
    op: int,
    prescale: float,
    postscale: float,
    process_set: int,
    priority: int,
) -> Handle:
    """:func:`push` for a reduction of one array in place, which is the handle's result."""
    array = ctypes.byref(tensor.handle)
    manner = _manner(kind, op, -1, process_set, float(prescale), float(postscale))
    native = _push(
        manner, name.encode(), turn_of(name), _caller(), _priority(priority), 1, array, array, None, 0
    )
    return _pushed(native, (tensor,), tensor)


def set_engine(engine: _core.Engine | None) -> None:
    """Submit to this engine from now on; None: to none.

    Raises:
        HorovodVersionMismatchError: the native library is of another version than the core.
    """
    version = getattr(_library, "polyhvd_mxnet_api_version", None)  # the first ones had none
    api = None if engine is None else engine.native_api(0 if version is None else version())
    _library.polyhvd_mxnet_set_engine(api)


def counters() -> memoryview:
    """The live fields of struct Watch; by a view, which is quicker than ctypes."""
    first = _quick.polyhvd_mxnet_watch().contents
    return memoryview((ctypes.c_int64 * 5).from_address(ctypes.addressof(first))).cast("B").cast("q")


#: ``read(handle, data, size)`` waits for an array and copies it, but leaves an error in it; 0: that is done,
#: 1: there is an error, 2: it cannot be copied so. ``data`` may be None.
read = _library.polyhvd_mxnet_read


#: Of one lock, which the thread that has it may take again; threads of MXNet's take it as well.
lock, unlock = _library.polyhvd_mxnet_lock, _quick.polyhvd_mxnet_unlock


def settle() -> None:
    """Return when what has waited for collectives that failed was skipped."""
    _library.polyhvd_mxnet_settle()


def drain(seconds: float) -> bool:
    """Wait until no collective is in flight, so long at most; whether that is so."""
    return bool(_library.polyhvd_mxnet_drain(seconds))


def failure_in(message: bytes) -> Exception | None:
    """The error of the collective that a message of MXNet is about; None: it is about no collective."""
    text = ctypes.c_char_p()
    code = _quick.polyhvd_mxnet_failure_in(message, text)
    return _error(code, text) if code else None


def forget() -> None:
    """In a forked process: nothing is in flight."""
    _quick.polyhvd_mxnet_forget()
