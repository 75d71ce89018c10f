"""Reads of arrays while collectives are in flight, or after one has failed.

MXNet's engine gives an exception to the first reader and forgets it for all that waits behind the same
operation: an update that is still queued would then run on a gradient that was never reduced. So the
functions by which MXNet's Python reads get our wait, which removes no error; an error is
taken out by one reader at a time, after all that depends on it has been skipped, and raised as our class.
What MXNet's own code waits for, native.cc guards likewise.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from typing import Any

from mxnet import base
from mxnet.base import _LIB
from polyhvd.mxnet import native

__all__ = ["failures", "forgive", "install", "updates"]


class _Updates:
    """Held while updates are pushed that need what collectives write, and while an error is taken out."""

    def __enter__(self) -> None:
        native.lock()

    def __exit__(self, *_: object) -> None:
        native.unlock()


updates = _Updates()

_IN_FLIGHT, _FAILURES, _PUSHER, _UNSETTLED, _FORGIVEN = range(5)
_counters = native.counters()
_NOTHING = ctypes.c_size_t(0)
_mxnet_wait = _LIB.MXNDArrayWaitToRead
_mxnet_wait_to_write = _LIB.MXNDArrayWaitToWrite
_mxnet_wait_for_all = _LIB.MXNDArrayWaitAll
_mxnet_copy = _LIB.MXNDArraySyncCopyToCPU
_mxnet_error = base.get_last_ffi_error


def failures() -> int:
    """How many collectives have failed in this process."""
    return _counters[_FAILURES]


def _last_error() -> Exception:
    """The error of a call of MXNet; of our class if it comes from one of our collectives."""
    return native.failure_in(_LIB.MXGetLastError()) or _mxnet_error()


def _is_simple() -> bool:
    """Return whether this thread can read nothing in flight, and no other thread can take its error."""
    if _counters[_IN_FLIGHT] or _counters[_UNSETTLED] or _counters[_FAILURES] != _counters[_FORGIVEN]:
        return False
    pusher = _counters[_PUSHER]
    return not pusher or pusher == threading.get_ident()


def _take_error(read: Callable[..., int], *arguments: Any) -> int:
    """Let MXNet raise, once all updates that wait for what has failed have been skipped."""
    with updates:
        native.settle()
        return read(*arguments)


def _wait(handle: Any) -> int:
    if _is_simple():
        return _mxnet_wait(handle)
    return native.read(handle, None, _NOTHING) and _take_error(_mxnet_wait, handle)


def _wait_to_write(handle: Any) -> int:
    return _wait(handle) or _mxnet_wait_to_write(handle)


def _wait_for_all() -> int:
    if _counters[_UNSETTLED]:
        return _take_error(_mxnet_wait_for_all)
    return _mxnet_wait_for_all()


def _copy(handle: Any, data: Any, size: Any) -> int:
    if _is_simple():
        return _mxnet_copy(handle, data, size)
    return native.read(handle, data, size) and _take_error(_mxnet_copy, handle, data, size)


def install() -> None:
    """Guard what Python calls of MXNet to read arrays, and let it raise our classes."""
    base.get_last_ffi_error = _last_error
    _LIB.MXNDArrayWaitToRead = _wait
    _LIB.MXNDArrayWaitToWrite = _wait_to_write
    _LIB.MXNDArrayWaitAll = _wait_for_all
    _LIB.MXNDArraySyncCopyToCPU = _copy
    os.register_at_fork(after_in_child=_forget)


def forgive() -> None:
    """Take all errors of collectives out of MXNet's arrays, as a new job begins.

    What waited for these has been skipped, so parameters are as the last update left them.
    """
    failed = _counters[_FAILURES]
    if failed == _counters[_FORGIVEN]:
        return
    with updates:
        native.settle()
    _mxnet_wait_for_all()  # takes them out of all arrays, and returns the first
    _counters[_FORGIVEN] = failed


def _forget() -> None:
    """A forked process has no collectives in flight, and none of the threads that would end them."""
    native.forget()
