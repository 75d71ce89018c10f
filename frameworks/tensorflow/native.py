"""The op library: loaded into TensorFlow, and given the current engine."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow.call_order import keep_calls_in_order

from polyhvd import _core
from polyhvd.runtime import current

__all__ = ["library"]

#: Barrier and join are not among them: what is before them in the program comes before them.
_IN_ANY_ORDER = frozenset(
    f"Polyhvd{name}"
    for name in ("Allreduce", "Allgather", "Alltoall", "Broadcast", "Generation", "Reducescatter")
)


def _path() -> Path:
    path = Path(__file__).with_name("_native.so")
    if not path.exists():
        raise ImportError(
            f"polyhvd.tensorflow was installed without its op library {path.name}; reinstall polyhvd"
        )
    return path


def _load() -> tuple[Any, ctypes.CDLL]:
    """Register the ops; the module of their Python functions, and the library that they are in."""
    path = str(_path())
    ops = tf.load_op_library(path)  # before anybody else: TensorFlow lists what the loading registers
    native = ctypes.CDLL(path)
    native.polyhvd_tensorflow_problem.restype = ctypes.c_char_p
    native.polyhvd_tensorflow_set_engine.argtypes = [ctypes.c_void_p]
    problem = native.polyhvd_tensorflow_problem()
    if problem is not None:
        raise ImportError(
            f"polyhvd.tensorflow does not support this TensorFlow ({tf.__version__}): it lacks "
            f"{problem.decode()}; TensorFlow 2.13 and later are supported"
        )
    _exempt_from_ordering()
    keep_calls_in_order(tf.__version__)
    os.register_at_fork(after_in_child=native.polyhvd_tensorflow_forget_engine)
    return ops, native


def _follow(engine: _core.Engine | None) -> None:
    """Submit to this engine from now on; None: to none.

    Raises:
        HorovodVersionMismatchError: the op library is of another version than the core.
    """
    version = getattr(_native, "polyhvd_tensorflow_api_version", None)  # the first ones had none
    api = None if engine is None else engine.native_api(0 if version is None else version())
    _native.polyhvd_tensorflow_set_engine(api)


def _exempt_from_ordering() -> None:
    """Let collectives of one graph overlap, and let all of them run.

    TensorFlow serialises stateful ops in program order. Ours may start in any order, as ranks match
    them by name; but they must run even if this rank does not use the result, since others may, and
    a call of a function must not end before them (see call_order.py). Without
    the list, in a TensorFlow that has none, they are merely slower.
    """
    from tensorflow.python.framework import auto_control_deps

    name = "MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS"
    known = getattr(auto_control_deps, name, None)
    if known is not None:
        setattr(auto_control_deps, name, frozenset(known) | _IN_ANY_ORDER)


#: ``polyhvd_allreduce`` and so on, as TensorFlow generates them.
library, _native = _load()
current.on_change(_follow)
