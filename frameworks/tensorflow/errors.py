"""polyhvd's errors as TensorFlow's: each class is both, so that either can be caught.

Operations inside a ``tf.function`` fail only with TensorFlow's class, as TensorFlow raises them:
:func:`as_polyhvd` returns the corresponding error of polyhvd.
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
    "NotInitializedError",
    "PeerDepartedError",
    "PeerLostError",
    "ShutdownError",
    "TransferTimeoutError",
    "UnsupportedError",
    "UnsupportedTypeError",
    "as_polyhvd",
    "as_tensorflow",
    "invalid",
]


class _Both:
    """Takes TensorFlow's arguments: AutoGraph makes new errors, to add the lines of the user's function."""

    def __init__(self, node_def: Any, op: Any, message: str, *args: Any) -> None:
        super().__init__(node_def, op, message, *args)  # type: ignore[call-arg]


class InvalidArgumentError(_Both, tf.errors.InvalidArgumentError, errors.InvalidArgumentError):
    """A bad call: nothing was sent, and the job goes on."""


class UnsupportedError(InvalidArgumentError, errors.UnsupportedError):
    """An unsupported call, such as Max of tf.IndexedSlices; Horovod raises NotImplementedError."""


class UnsupportedTypeError(InvalidArgumentError, errors.UnsupportedTypeError):
    """A tensor of a type that an operation does not know; TensorFlow raises TypeError."""


def invalid(message: str) -> InvalidArgumentError:
    """The error of a bad call, or of an argument that is not supported."""
    return InvalidArgumentError(None, None, message)


class NotInitializedError(_Both, tf.errors.FailedPreconditionError, errors.NotInitializedError):
    """A graph ran before ``init()``, or after ``shutdown()``."""


class FailedPreconditionError(_Both, tf.errors.FailedPreconditionError, errors.RankMismatchError):
    """Ranks asked for different things under one name; raised on every rank."""


class PeerLostError(_Both, tf.errors.AbortedError, errors.PeerLostError):
    """A rank died or was cut off; this engine cannot go on."""


class PeerDepartedError(_Both, tf.errors.AbortedError, errors.PeerDepartedError):
    """A rank that this operation needs has shut down in good order."""


class TransferTimeoutError(_Both, tf.errors.DeadlineExceededError, errors.TransferTimeoutError):
    """An agreed transfer did not finish within POLYHVD_DATA_TIMEOUT_SECONDS."""


class ShutdownError(_Both, tf.errors.AbortedError, errors.ShutdownError):
    """The engine was shut down while the operation was pending."""


class AbortedError(_Both, tf.errors.AbortedError, errors.HorovodInternalError):
    """A collective failed."""


#: Of the core's errors, and of others that the op library's kernels report.
_FROM_CORE: dict[type[Exception], Any] = {
    errors.InvalidArgumentError: InvalidArgumentError,
    errors.RankMismatchError: FailedPreconditionError,
    errors.PeerLostError: PeerLostError,
    errors.PeerDepartedError: PeerDepartedError,
    errors.TransferTimeoutError: TransferTimeoutError,
    errors.ShutdownError: ShutdownError,
    errors.HorovodInternalError: AbortedError,
    errors.NotInitializedError: NotInitializedError,
}
#: By TensorFlow's class, where a kernel's message names none.
_FROM_KERNEL: dict[type[Exception], Any] = {
    tf.errors.InvalidArgumentError: InvalidArgumentError,
    tf.errors.FailedPreconditionError: FailedPreconditionError,
    tf.errors.DeadlineExceededError: TransferTimeoutError,
    tf.errors.AbortedError: AbortedError,
}
_BY_NAME = {core.__name__: both for core, both in _FROM_CORE.items()}

# What TensorFlow puts in front of a kernel's message, and behind it: nodes, and their functions.
_NODE = re.compile(r"^(\{\{\w+ [^}]*\}\} )+")
_PLACE = re.compile(r"(\n\s*\[\[\{\{|\s*\[Op:)[\s\S]*$")

# The class, which kernels put in front. Where several have failed, TensorFlow lists their messages.
_CLASS = re.compile(
    rf"^(?:\{{\{{\w+ [^}}]*\}}\}} )*(?:\s*\(\d+\) [A-Z_]+: )?(?:\{{\{{\w+ [^}}]*\}}\}} )*"
    rf"({'|'.join(_BY_NAME)}): ",
    re.MULTILINE,
)


def as_polyhvd(error: BaseException) -> BaseException:
    """The error of polyhvd that one of TensorFlow's stands for; the same one if it is none of polyhvd's.

    TensorFlow's class is the same for a lost rank and one that has departed: in a ``tf.function`` both are an
    ``AbortedError``. A bad call that is found when a graph runs is an ``InvalidArgumentError`` like any of
    TensorFlow's own, and stays that.

    Args:
        error: what a call of a ``tf.function``, ``model.fit`` or a session has raised.

    Returns:
        An error of polyhvd's class and of TensorFlow's, with the core's message.

    Example::

        try:
            step(batch)
        except tf.errors.OpError as error:
            if isinstance(as_polyhvd(error), polyhvd.errors.PeerLostError):
                restore()
    """
    if not isinstance(error, tf.errors.OpError) or isinstance(error, tuple(_FROM_CORE)):
        return error
    named = _CLASS.search(error.message)
    if named is None:
        return error
    translated: BaseException = _BY_NAME[named[1]](
        error.node_def, error.op, _PLACE.sub("", error.message[named.end() :])
    )
    translated.__cause__ = error
    return translated


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
        text: Any = error
        message = _NODE.sub("", text.message)
        named = _CLASS.match(message)
        if named:
            both, message = _BY_NAME[named[1]], message[named.end() :]
        raise both(None, None, message) from None
