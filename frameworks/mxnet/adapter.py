"""MXNet arrays, as the collectives see them: each collective is an operation of MXNet's engine."""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, MXNetError
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from polyhvd import context, errors
from polyhvd.adapter import Capability, Operation, OpKind
from polyhvd.errors import InvalidArgumentError

__all__ = ["Handle", "MxnetAdapter", "Names"]

_BFLOAT16 = np.dtype([("bfloat16", np.uint16)])  # as MXNet spells it


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


class Names:
    """Names for calls without one. They recur, so that the response cache knows them.

    A handle is usually dropped in MXNet, so a name cannot be given back when the operation is done.
    Names are used in turn instead; native.cc keeps operations of one name in program order. The
    period divides by many numbers: a step with that many calls gets the same names each time.
    """

    PERIOD = 240

    def __init__(self) -> None:
        self._counters: dict[tuple[OpKind, int | None], itertools.count[int]] = {}

    def next(self, kind: OpKind, process_set: int | None) -> str:
        """The name of the next call of this kind on the process set."""
        counter = self._counters.get((kind, process_set))
        if counter is None:
            counter = self._counters.setdefault((kind, process_set), itertools.count())
        return f"{kind.name.lower()}.noname.{next(counter) % self.PERIOD}"

    def restart(self) -> None:
        """Count from zero again, as the ranks of a new engine do."""
        self._counters.clear()


def _caller() -> str:
    """The line of the user's code that made the call, such as ``train.py:88``, for error messages."""
    frame = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(("polyhvd.", "mxnet.")):
            return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _empty(shape: tuple[int, ...], like: NDArray) -> NDArray:
    """A new array in ``like``'s element type and flavour (``mx.nd`` or ``mx.np``)."""
    make = mx.np.empty if isinstance(like, mx.np.ndarray) else mx.nd.empty
    return make(shape, dtype=like.dtype, ctx=like.ctx)


def _gathered_rows(operation: Operation, tensors: Sequence[NDArray]) -> Sequence[int]:
    """First dimensions of the outputs: the ranks tell each other theirs, and wait for that."""
    for tensor in tensors:
        if not tensor.shape:
            raise InvalidArgumentError(
                f"allgather '{operation.name}': a scalar has no first dimension; reshape it to (1,)"
            )
    rows = np.array([[tensor.shape[0] for tensor in tensors]], dtype=np.int64)
    handle = context.engine().submit(
        OpKind.ALLGATHER,
        f"{operation.name}.rows",
        (rows,),
        None,
        process_set=operation.process_set,
        blocking=True,
    )
    handle.wait()
    every = np.frombuffer(handle.buffers()[0], dtype=np.int64).reshape(-1, len(tensors))
    totals: list[int] = every.sum(axis=0).tolist()
    return totals


class MxnetAdapter:
    """See :class:`polyhvd.adapter.FrameworkAdapter`."""

    name = "mxnet"
    capabilities = frozenset(
        {
            Capability.IN_PLACE,
            Capability.ASYNC,
            Capability.BFLOAT16,
            Capability.BOOL,
            Capability.EMPTY,
        }
    )

    def __init__(self) -> None:
        #: Names for the calls of users that give none.
        self.names = Names()
        context.on_engine_change(self._on_engine_change)

    def _on_engine_change(self, table: int) -> None:
        _library.polyhvd_mxnet_set_engine(table or None)
        self.names.restart()

    def submit(
        self, operation: Operation, tensors: Sequence[NDArray], out: Sequence[NDArray] | None
    ) -> Handle:
        """Give a collective to MXNet's engine, which runs it once the arrays are ready.

        Waits for nothing, except that an allgather waits until all ranks have told their sizes.
        """
        if not tensors:
            raise InvalidArgumentError(f"'{operation.name}': there is no array")
        for tensor in tensors:
            if not isinstance(tensor, NDArray):
                found = type(tensor).__name__
                raise TypeError(
                    f"'{operation.name}': expected an MXNet array, found {found}; use mx.nd.array()"
                )
        if operation.kind == OpKind.ALLGATHER:
            rows = _gathered_rows(operation, tensors)
            out = [_empty((n, *t.shape[1:]), t) for n, t in zip(rows, tensors, strict=True)]
        elif out is None:
            out = [_empty(t.shape, t) for t in tensors]
        elif not all(t.writable for t in out):
            raise InvalidArgumentError(f"'{operation.name}': the array is read-only; pass a writable one")
        return self._push(operation, tensors, out)

    def _push(self, operation: Operation, tensors: Sequence[NDArray], out: Sequence[NDArray]) -> Handle:
        array_type = ctypes.c_void_p * len(tensors)
        inputs = array_type(*[t.handle.value for t in tensors])
        outputs = inputs if out is tensors else array_type(*[t.handle.value for t in out])
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
        )
        code = ctypes.c_int32()
        message = ctypes.c_char_p()
        native = _library.polyhvd_mxnet_push(call, code, message)
        if native is None:
            raise _error(code.value, message)
        return Handle(native, out)

    def dtype(self, tensor: NDArray) -> str:
        """Name of the array's element type."""
        dtype = np.dtype(tensor.dtype)
        return "bfloat16" if dtype == _BFLOAT16 else dtype.name

    def cast(self, tensor: NDArray, dtype: str) -> NDArray:
        """``tensor.astype(dtype)``, without a copy when it has that type."""
        return tensor.astype(_BFLOAT16 if dtype == "bfloat16" else np.dtype(dtype), copy=False)

    def assign(self, target: NDArray, value: NDArray) -> None:
        """Copy ``value`` into ``target``; MXNet casts."""
        value.copyto(target)

    def named_parameters(self, owner: object) -> Iterable[tuple[str, NDArray]]:
        """Arrays of a dict by key; those of Gluon parameters by position.

        Gluon's own names have counters of the process in them (``dense3_weight``), which need not
        agree between ranks. Parameters that are not initialised yet are left out.
        """
        if not isinstance(owner, Mapping) and not hasattr(owner, "items"):
            raise InvalidArgumentError(
                f"expected a dict of arrays, or net.collect_params(); found {type(owner).__name__}"
            )
        for position, (key, value) in enumerate(owner.items()):
            if not isinstance(value, Parameter):
                yield str(key), value
            elif value._data is not None:
                yield str(position), value.data(value.list_ctx()[0])
