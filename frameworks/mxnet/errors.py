"""polyhvd's errors as MXNet's: each class is both, so that either can be caught."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from mxnet.base import MXNetError

from polyhvd import errors

__all__ = [
    "HorovodInternalError",
    "InvalidArgumentError",
    "PeerDepartedError",
    "PeerLostError",
    "RankMismatchError",
    "ShutdownError",
    "TransferTimeoutError",
    "UnsupportedError",
    "as_mxnets",
    "by_code",
]


class InvalidArgumentError(errors.InvalidArgumentError, MXNetError):
    """A bad call: nothing was sent, and the job goes on."""


class UnsupportedError(errors.UnsupportedError, MXNetError):
    """A call that is not supported."""


class HorovodInternalError(errors.HorovodInternalError, MXNetError):
    """A collective failed."""


class RankMismatchError(errors.RankMismatchError, MXNetError):
    """Ranks asked for different things under one name; raised on every rank."""


class PeerLostError(errors.PeerLostError, MXNetError):
    """A rank died or was cut off; this engine cannot go on."""


class PeerDepartedError(errors.PeerDepartedError, MXNetError):
    """A rank that this operation needs has shut down in good order."""


class ShutdownError(errors.ShutdownError, MXNetError):
    """The engine was shut down while the operation was pending."""


class TransferTimeoutError(errors.TransferTimeoutError, MXNetError):
    """An agreed transfer did not finish within POLYHVD_DATA_TIMEOUT_SECONDS."""


_CLASSES: dict[type[Exception], type[Exception]] = {
    errors.InvalidArgumentError: InvalidArgumentError,
    errors.UnsupportedError: UnsupportedError,
    errors.HorovodInternalError: HorovodInternalError,
    errors.RankMismatchError: RankMismatchError,
    errors.PeerLostError: PeerLostError,
    errors.PeerDepartedError: PeerDepartedError,
    errors.ShutdownError: ShutdownError,
    errors.TransferTimeoutError: TransferTimeoutError,
}


def by_code() -> dict[int, type[Exception]]:
    """The class above for each of the core's error codes."""
    return {code: _CLASSES[core] for code, core in errors.by_code().items()}


@contextlib.contextmanager
def as_mxnets() -> Iterator[None]:
    """Raise errors that MXNet's engine has no part in as these classes, too."""
    try:
        yield
    except (errors.HorovodInternalError, errors.InvalidArgumentError) as error:
        if isinstance(error, MXNetError):
            raise
        kind = InvalidArgumentError if isinstance(error, ValueError) else HorovodInternalError
        raise _CLASSES.get(type(error), kind)(*error.args) from error.__cause__
