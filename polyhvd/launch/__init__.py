"""Starting jobs: the ``polyhvdrun`` command, the rendezvous, and how ranks prove that they belong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

__all__ = ["run"]

_T = TypeVar("_T")


def run(
    func: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int | None = None,
    hosts: str | None = None,
    env: Mapping[str, str] | None = None,
    network_interface: str = "",
    start_timeout_s: float = 30.0,
    output_filename: str | None = None,
    verbose: bool = False,
) -> list[_T]:
    """Call a function on every rank of a new job, and return the results in rank order.

    Args:
        func: called as ``func(*args, **kwargs)`` in a process of its own on every rank; it, the
            arguments and the result travel by cloudpickle.
        args: positional arguments.
        kwargs: keyword arguments.
        np: number of ranks; None: every slot of ``hosts``.
        hosts: ``host1:2,host2:2``; None: this host.
        env: environment variables of the ranks, on top of those of this process.
        network_interface: as for polyhvdrun, like the options that follow.
        start_timeout_s: seconds for all ranks to start, and to meet in ``init()``.
        output_filename: a folder for the output of each rank.
        verbose: say what is started where.

    Raises:
        RuntimeError: a rank failed; the message names it and ends with its traceback.
        ValueError: the hosts or their slots cannot be used.

    Example::

        results = polyhvd.launch.run(train, args=(0.01,), np=4)
    """
    from polyhvd.launch.function import run_function  # not needed by ranks

    return run_function(
        (func, tuple(args), dict(kwargs or {})),
        np=np,
        hosts=hosts,
        env=dict(env or {}),
        interface=network_interface,
        start_timeout_s=start_timeout_s,
        directory=output_filename,
        verbose=verbose,
    )
