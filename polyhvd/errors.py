"""The exceptions of polyhvd. ``csrc/control/error.h`` lists the core's errors, and the class of each.

::

    Exception
    ├── ValueError
    │   ├── NotInitializedError        a call before init(); also a RuntimeError
    │   ├── InvalidArgumentError       a bad call, found at submit; the job goes on; also a RuntimeError
    │   │   ├── UnsupportedError       an unsupported combination; also a NotImplementedError
    │   │   └── UnsupportedTypeError   elements of an unsupported type; also a TypeError
    │   └── config.ConfigError         an environment variable cannot be used
    ├── RuntimeError
    │   ├── HorovodInternalError       a collective failed
    │   │   ├── RankMismatchError      ranks disagree; raised on every rank; the job goes on
    │   │   ├── PeerLostError          a rank died or was cut off
    │   │   ├── PeerDepartedError      a rank that is needed has shut down
    │   │   ├── ShutdownError          shutdown() while work was pending
    │   │   └── TransferTimeoutError   an agreed transfer did not finish in time
    │   ├── HostsUpdatedInterrupt      elastic: the set of hosts has changed
    │   ├── CheckpointError            elastic: a checkpoint cannot be written or read
    │   └── DataError                  data: a file cannot be read, or does not fit the others
    └── ImportError
        └── HorovodVersionMismatchError   parts of different versions were mixed
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType

__all__ = [
    "CheckpointError",
    "DataError",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "InvalidArgumentError",
    "NotInitializedError",
    "PeerDepartedError",
    "PeerLostError",
    "RankMismatchError",
    "ShutdownError",
    "TransferTimeoutError",
    "UnsupportedError",
    "UnsupportedTypeError",
]


class NotInitializedError(ValueError, RuntimeError):
    """A call that needs ``init()`` came before it.

    Horovod raises a ValueError or, from a collective, a RuntimeError.
    """

    def __init__(self, message: str = "polyhvd has not been initialized; use hvd.init().") -> None:
        super().__init__(message)


class InvalidArgumentError(ValueError, RuntimeError):
    """A bad call: nothing was sent, and the job goes on.

    It is a ValueError and a RuntimeError, since Horovod raises one or the other, depending on where it
    finds the fault; scripts that catch either go on working.
    """


class UnsupportedError(InvalidArgumentError, NotImplementedError):
    """A call with an unsupported combination of arguments; Horovod raises NotImplementedError."""


class UnsupportedTypeError(InvalidArgumentError, TypeError):
    """A tensor whose elements are of a type that cannot be communicated; Horovod raises ValueError."""


class HorovodInternalError(RuntimeError):
    """A collective failed. Elastic code catches it and restores the last commit."""


class RankMismatchError(HorovodInternalError):
    """Ranks asked for different things under one name.

    Raised on every rank with every rank's side. A retry would fail in the same way:
    elastic code must not catch it.
    """


class PeerLostError(HorovodInternalError):
    """A rank died or was cut off; this engine cannot go on."""


class PeerDepartedError(HorovodInternalError):
    """A rank that this operation needs has shut down, or its program has ended with an exception."""


class ShutdownError(HorovodInternalError):
    """The engine was shut down while the operation was pending."""


class TransferTimeoutError(HorovodInternalError):
    """An agreed transfer did not finish within POLYHVD_DATA_TIMEOUT_SECONDS."""


class HostsUpdatedInterrupt(RuntimeError):
    """The set of hosts has changed (elastic jobs)."""

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__("the set of hosts has changed")
        self.skip_sync = skip_sync


class CheckpointError(RuntimeError):
    """A checkpoint on disk cannot be written, or cannot be read (``elastic.train``)."""


class DataError(RuntimeError):
    """A file of data cannot be read, or does not fit the others (``polyhvd.data``)."""


class HorovodVersionMismatchError(ImportError):
    """Parts of polyhvd of different versions were mixed in one process."""


@functools.cache
def by_code() -> Mapping[int, type[Exception]]:
    """The class of each of the core's error codes, as ``csrc/control/error.h`` has them.

    Raises:
        ImportError: the compiled core is not there. Nothing else in this module needs it.

    Example::

        errors.by_code()[3]  # PeerLostError
    """
    from polyhvd import _core

    return MappingProxyType({code: globals()[name] for code, name, _, _ in _core.ERRORS})
