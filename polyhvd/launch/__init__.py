"""Starting jobs: the ``polyhvdrun`` command, the rendezvous, and how ranks prove that they belong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeVar

__all__ = ["run"]

_T = TypeVar("_T")


def run(
    func: Callable[..., _T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | bool | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    env: Mapping[str, str] | None = None,
    term_grace_s: float = 30.0,
) -> list[_T]:
    """Call a function on every rank of a new job, and return the results in rank order.

    The arguments, up to ``max_np``, are ``horovod.run``'s, in its order.

    Args:
        func: called as ``func(*args, **kwargs)`` on every rank, each a separate process. The function, its
            arguments and its result are pickled by cloudpickle.
        args: positional arguments.
        kwargs: keyword arguments.
        num_proc: number of ranks; None: every slot of the hosts, of this host one. ``np`` is another name.
        hosts: ``host1:2,host2:2``; None: those of the job of Slurm, LSF or PBS around this process, as
            polyhvdrun has them, or else this host.
        hostfile: the same from a file, with ``host slots=N`` in each line.
        start_timeout: seconds for all ranks to start, and to meet in ``init()``; None: 30.
        ssh_port: port of ssh on the other hosts.
        ssh_identity_file: private key for ssh.
        output_filename: a folder for the output of each rank.
        verbose: report which rank is started on which host.
        network_interfaces: interface, network or address of all connections; several with commas, or as a
            list. ``network_interface`` is another name.
        executable: Python of the ranks; None: the path of this one.
        min_num_proc: fewest ranks of an elastic job, as polyhvdrun's ``--min-np``; ``min_np`` is another
            name. This, ``max_num_proc``, ``reset_limit``, ``cooldown_range`` and ``host_discovery_script``
            each make the job elastic, and the results are those of its last world.
        max_num_proc: most ranks of an elastic job, as ``--max-np``; ``max_np`` is another name.
        slots: of each host that is named without a number.
        reset_limit: as polyhvdrun's option.
        cooldown_range: as polyhvdrun's ``--blacklist-cooldown-range``.
        host_discovery_script: as polyhvdrun's option.
        disable_cache: has no effect, and neither has ``use_gloo``.
        use_mpi: start the ranks with MPI's launcher, as ``polyhvdrun --mpi`` does.
        mpi_args: options of MPI's launcher, which imply ``use_mpi``.
        env: environment variables of the ranks, on top of those of this process.
        term_grace_s: seconds that ranks have from SIGTERM to SIGKILL.

    What ranks print goes through this process's ``sys.stdout`` and ``sys.stderr``, as it comes.

    Raises:
        Exception: what the rank has raised that failed first; its ``__cause__`` is a RuntimeError with the
            rank and its traceback.
        RuntimeError: a rank was killed, has called ``sys.exit()``, or failed with an exception that cannot be
            pickled; the message names the rank and ends with its traceback.
        KeyboardInterrupt: Ctrl-C in the main thread, after the ranks have ended.
        ValueError: the hosts or their slots cannot be used, or an argument is refused; or the function with
            its arguments, or the result of a rank, is larger than 256 MiB when pickled.
        TypeError: ``func`` cannot be called, an argument is of another type, or ``func`` and its arguments
            cannot be pickled; nothing was started.
        OSError: hosts cannot take part, and nothing was started; the message is a table of them.

    Example::

        results = polyhvd.run(train, args=(0.01,), np=4)
    """
    if np is not None and num_proc is not None and np != num_proc:
        raise ValueError(f"run(np={np}, num_proc={num_proc}): they are one argument; give one of them")
    ranks = num_proc if np is None else np
    for name, short, long in (("min", min_np, min_num_proc), ("max", max_np, max_num_proc)):
        if short is not None and long is not None and short != long:
            raise ValueError(
                f"run({name}_np={short}, {name}_num_proc={long}): they are one argument; give one of them"
            )
    if (use_mpi or mpi_args) and (use_gloo or output_filename):
        other = "use_gloo" if use_gloo else "output_filename"
        raise ValueError(f"run(): use_mpi and mpi_args exclude {other}")
    _check_call(func, args, kwargs, ranks, env)
    from polyhvd.launch.job.function import run_function  # not needed by ranks

    interfaces = network_interface or network_interfaces or ""
    return run_function(
        (func, tuple(args), dict(kwargs or {})),
        np=ranks,
        elastic={
            "min_np": min_num_proc if min_np is None else min_np,
            "max_np": max_num_proc if max_np is None else max_np,
            "reset_limit": reset_limit,
            "blacklist_cooldown_range": cooldown_range,
            "host_discovery_script": host_discovery_script,
        },
        slots=slots,
        mpi_args=(mpi_args or "") if use_mpi or mpi_args else None,
        hosts=hosts,
        hostfile=hostfile,
        env=dict(env or {}),
        interface=interfaces if isinstance(interfaces, str) else ",".join(interfaces),
        start_timeout_s=30.0 if start_timeout is None else float(start_timeout),
        term_grace_s=term_grace_s,
        directory=output_filename,
        verbose=bool(verbose),
        python=executable,
        ssh_port=ssh_port,
        ssh_identity_file=ssh_identity_file,
    )


def _check_call(func: object, args: object, kwargs: object, ranks: object, env: object) -> None:
    """Raise TypeError for arguments that would fail on every rank."""
    if not callable(func):
        raise TypeError(f"run(): func must be a function; found {func!r}")
    if not isinstance(args, Sequence) or isinstance(args, (str, bytes)):
        raise TypeError(f"run(): args must be a tuple or a list; found {args!r}")
    if not isinstance(kwargs, (Mapping, type(None))):
        raise TypeError(f"run(): kwargs must be a dict; found {kwargs!r}")
    if ranks is not None and not isinstance(ranks, SupportsIndex):
        raise TypeError(f"run(): np must be a whole number; found {ranks!r}")
    for name, value in dict(env or {}).items():  # type: ignore[call-overload]
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"run(): env must have texts; found {name!r}: {value!r}")
