"""Data-parallel training for MXNet/Gluon, PyTorch, TensorFlow/Keras and plain arrays.

Import the module of your framework::

    import polyhvd.torch as hvd      # or .mxnet, .tensorflow, .keras, .numpy
    hvd.init()

What all of them share is also here. Importing this package needs no framework.
"""

from __future__ import annotations

from importlib import import_module as _import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING
from typing import Any as _Any

from polyhvd import installed as _installed

if not _installed.has_core(_Path(__file__).parent):
    raise _installed.without_core(_Path(__file__).parent)

from polyhvd.runtime import current as _current

if TYPE_CHECKING:
    from polyhvd import capabilities as capabilities
    from polyhvd import collectives as collectives
    from polyhvd import config as config
    from polyhvd import errors as errors
    from polyhvd import launch as launch
    from polyhvd import observe as observe
    from polyhvd import shared as shared
    from polyhvd.shared import *

__version__ = "0.1.0"
"""Version of polyhvd."""

#: Parts that are there as attributes without being imported by name.
_PARTS = frozenset({"capabilities", "collectives", "config", "errors", "launch", "observe", "shared"})

if not TYPE_CHECKING:  # a type checker would accept any name

    def __getattr__(name: str) -> _Any:
        # Here and not at the top: with all its imports a launcher would start in three times the time.
        if name in _PARTS:
            return _import_module(f"polyhvd.{name}")
        if name in __all__:
            value = globals()[name] = getattr(_import_module("polyhvd.shared"), name)
            return value
        advice = "" if name.startswith("__") else _installed.advice_on(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{advice}")


def rank() -> int:
    """World rank of this process, from 0 to ``size() - 1``.

    It also works in forked children of a rank, such as workers of a data loader, as do ``size()`` and
    ``local_rank()``: they return the values of the rank at the time of the fork.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.

    Example::

        if hvd.rank() == 0:
            print("only one rank prints this")
    """
    return _current.placement().rank


def size() -> int:
    """Number of ranks in the job.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.

    Example::

        learning_rate = 0.01 * hvd.size()
    """
    return _current.placement().size


def local_rank() -> int:
    """Rank among the processes of this host.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.

    Example::

        torch.cuda.set_device(hvd.local_rank())
    """
    return _current.placement().local_rank


def local_size() -> int:
    """Number of ranks on this host.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.

    Example::

        threads = os.cpu_count() // hvd.local_size()
    """
    return _current.placement().local_size


def cross_rank() -> int:
    """Position of this host among the hosts that have this local rank.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.

    Example::

        is_first_host = hvd.cross_rank() == 0
    """
    return _current.placement().cross_rank


def cross_size() -> int:
    """Number of hosts that have this local rank.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.

    Example::

        print(f"on {hvd.cross_size()} hosts")
    """
    return _current.placement().cross_size


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.

    Example::

        assert hvd.is_homogeneous()
    """
    return _current.world().is_homogeneous


def counters() -> dict[str, int]:
    """Statistics of this process since ``init()``: operations, bytes per transport, cache hits, wakes, and
    what was read and waited for by the loaders of :mod:`polyhvd.data`. :func:`metrics` has them with units.

    In an elastic job they go on from one world to the next; only ``pending`` is of the present one.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.

    Example::

        before = hvd.counters()
        train_one_step()
        print({name: value - before[name] for name, value in hvd.counters().items()})
    """
    return _current.world().counters()


def metrics() -> dict[str, float]:
    """How this rank trains, as numbers with units in their names: time of a step, waits, bytes, stalls.

    The names are the same in every framework, those of polyhvdrun's page for Prometheus without
    ``polyhvd_``; ``polyhvd docs watching`` lists them. Those that end in ``_total`` only grow, also from one
    world of an elastic job to the next. The call takes microseconds and does not communicate.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.

    Example::

        found = hvd.metrics()
        print(f"{1e3 * found['step_seconds']:.1f} ms, {found['wait_ratio']:.0%} of it waiting for others")
    """
    from polyhvd.runtime.metrics import read

    return read(_current.world())


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Begin to write this rank's operations to a file, as a trace for Perfetto or chrome://tracing.

    Each rank that calls it writes its own file: rank 0 ``file_path``, rank 3 of ``trace.json``
    ``trace.rank3.json``. Ranks need not call it together. In an elastic job a process goes on with its file
    in the next world, where the same call does nothing. See ``polyhvd docs timeline``.

    Args:
        file_path: path of rank 0's file; an existing one is overwritten.
        mark_cycles: mark when the engine begins new work.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.
        InvalidArgumentError: a timeline is being written already.
        OSError: the file cannot be written.

    Example::

        hvd.start_timeline("trace.json")
        train_one_step()
        hvd.stop_timeline()
    """
    from polyhvd.observe.tracing import start_timeline

    start_timeline(_current.world(), file_path, mark_cycles)


def stop_timeline() -> None:
    """Finish the file of :func:`start_timeline`; does nothing when there is none.

    Raises:
        NotInitializedError: before ``init()``, or after ``shutdown()``.

    Example::

        hvd.start_timeline("trace.json")
        train_one_step()
        hvd.stop_timeline()
    """
    from polyhvd.observe.tracing import stop_timeline

    stop_timeline(_current.world())


__all__ = [
    "Adasum",
    "Average",
    "CheckpointError",
    "DataError",
    "HorovodInternalError",
    "HorovodVersionMismatchError",
    "HostsUpdatedInterrupt",
    "InvalidArgumentError",
    "Max",
    "Min",
    "NotInitializedError",
    "PeerDepartedError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "RankMismatchError",
    "ReduceOp",
    "Settings",
    "ShutdownError",
    "Sum",
    "TransferTimeoutError",
    "UnsupportedError",
    "UnsupportedTypeError",
    "__version__",
    "add_process_set",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "ccl_built",
    "counters",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "doctor",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "make_mxnet_importable",
    "metrics",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_of",
    "rank",
    "remove_process_set",
    "rocm_built",
    "run",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def __dir__() -> list[str]:
    frameworks = [name for name, value in globals().items() if "allreduce" in getattr(value, "__all__", ())]
    return [*__all__, "errors", *frameworks]
