"""polyhvd's errors as TensorFlow's: each class is both, so that either can be caught.

Operations inside a ``tf.function`` fail with TensorFlow's class alone, as TensorFlow raises them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from polyhvd import errors

__all__ = [
    "AbortedError",
    "FailedPreconditionError",
    "InvalidArgumentError",
    "PeerDepartedError",
    "PeerLostError",
    "ShutdownError",
    "TransferTimeoutError",
    "UnsupportedError",
    "UnsupportedTypeError",
    "as_tensorflow",
    "invalid",
]


class _Both:
    """Takes TensorFlow's arguments: AutoGraph makes errors anew, to add the lines of the user's function."""

    def __init__(self, node_def: Any, op: Any, message: str, *args: Any) -> None:
        super().__init__(node_def, op, message, *args)  # type: ignore[call-arg]


class InvalidArgumentError(_Both, tf.errors.InvalidArgumentError, errors.InvalidArgumentError):
    """A bad call: nothing was sent, and the job goes on."""


class UnsupportedError(InvalidArgumentError, errors.UnsupportedError):
    """What cannot be had in this way, such as Max of tf.IndexedSlices; Horovod raises NotImplementedError."""


class UnsupportedTypeError(InvalidArgumentError, errors.UnsupportedTypeError):
    """A tensor of a type that an operation does not know; TensorFlow raises TypeError."""


def invalid(message: str) -> InvalidArgumentError:
    """The error of a bad call, or of an argument that is not supported."""
    return InvalidArgumentError(None, None, message)


class FailedPreconditionError(_Both, tf.errors.FailedPreconditionError, errors.RankMismatchError):
    """Ranks asked for different things under one name; raised on every rank."""


class PeerLostError(_Both, tf.errors.AbortedError, errors.PeerLostError):
    """A rank died or was cut off; this engine cannot go on."""


class PeerDepartedError(_Both, tf.errors.AbortedError, errors.PeerDepartedError):
    """A rank that this operation needs has shut down in good order."""


class TransferTimeoutError(_Both, tf.errors.AbortedError, errors.TransferTimeoutError):
    """An agreed transfer did not finish within POLYHVD_DATA_TIMEOUT_SECONDS."""


class ShutdownError(_Both, tf.errors.AbortedError, errors.ShutdownError):
    """The engine was shut down while the operation was pending."""


class AbortedError(_Both, tf.errors.AbortedError, errors.HorovodInternalError):
    """A collective failed."""


# What TensorFlow puts in front of a kernel's message.
_NODE = re.compile(r"^\{\{function_node [^}]*\}\} ")

# What the op library's kernels put there: the class.
_CLASS = re.compile(r"^(\w+Error): ")

# The core's errors, and those that the op library's kernels report.
_FROM_CORE: dict[type[Exception], Any] = {
    errors.InvalidArgumentError: InvalidArgumentError,
    errors.RankMismatchError: FailedPreconditionError,
    errors.PeerLostError: PeerLostError,
    errors.PeerDepartedError: PeerDepartedError,
    errors.TransferTimeoutError: TransferTimeoutError,
    errors.ShutdownError: ShutdownError,
    errors.HorovodInternalError: AbortedError,
}
_FROM_KERNEL: dict[type[Exception], Any] = {
    tf.errors.InvalidArgumentError: InvalidArgumentError,
    tf.errors.FailedPreconditionError: FailedPreconditionError,
    tf.errors.AbortedError: AbortedError,
}
_BY_NAME = {core.__name__: both for core, both in _FROM_CORE.items()}


@contextmanager
def as_tensorflow() -> Iterator[None]:
    """Raise what the core or a kernel raises as the class above that stands for it."""
    try:
        yield
    except tuple(_FROM_CORE) as error:
        both = _FROM_CORE.get(type(error))
        if both is None:
            raise
        raise both(None, None, str(error)) from None
    except tuple(_FROM_KERNEL) as error:
        both = _FROM_KERNEL.get(type(error))
        if both is None:
            raise
        message = _NODE.sub("", error.message)
        named = _CLASS.match(message)
        if named and named[1] in _BY_NAME:
            both, message = _BY_NAME[named[1]], message[named.end() :]
        raise both(None, None, message) from None
