"""The program of a compute job: ``polyhvdrun -np 4 python -m polyhvd.tensorflow.data.compute_worker FILE``.

Each rank is a worker of tf.data's service. FILE is for the training job: see ``polyhvd docs data``.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path

import polyhvd.tensorflow as hvd
from polyhvd.tensorflow.data.compute_service import ComputeService, TfDataServiceConfig, compute_worker_fn

from polyhvd.config import Settings

__all__ = ["main", "parser", "remove", "workers_of_each"]


def main(
    dispatchers: int, dispatcher_side: str, configfile: str, timeout: int, keep_running: bool = False
) -> None:
    """Be a rank of a compute job; rank 0 also serves the addresses, and writes and removes the file.

    Args:
        dispatchers: how many there are; the number of ranks is a multiple of it.
        dispatcher_side: where they run: ``"compute"`` or ``"training"``.
        configfile: the file that training processes read.
        timeout: seconds in which all processes have to start.
        keep_running: whether to serve further training jobs when one has ended.

    Raises:
        ValueError: an argument cannot be used.
        OSError: the file cannot be written.
    """
    hvd.init()
    each = workers_of_each(hvd.size(), dispatchers)
    interface = Settings.from_environment().interface
    config, service = None, None
    try:
        if hvd.rank() == 0:
            service = ComputeService(dispatchers, each, nics=interface, keep_running=keep_running)
            addresses = service.addresses()
            config = TfDataServiceConfig(dispatchers, each, dispatcher_side, addresses, service.key, timeout)
            config.write(configfile)
        config = hvd.broadcast_object(config, name="TfDataServiceConfig")
        compute_worker_fn(config)
    finally:
        if service is not None:
            remove(configfile, service.key)
            service.shutdown()


def workers_of_each(size: int, dispatchers: int) -> int:
    """The number of workers of each dispatcher.

    Args:
        size: number of ranks of the compute job.
        dispatchers: how many there are.

    Raises:
        ValueError: it does not divide by them.
    """
    if dispatchers < 1 or size % dispatchers:
        raise ValueError(f"the number of ranks ({size}) must be a multiple of --dispatchers ({dispatchers})")
    return size // dispatchers


def remove(configfile: str, key: bytes) -> None:
    """Remove a configuration, unless it is another job's by now.

    Args:
        configfile: its file.
        key: of the job.
    """
    with contextlib.suppress(OSError, ValueError):
        if TfDataServiceConfig.read(configfile).key == key:
            Path(configfile).unlink()


def parser() -> argparse.ArgumentParser:
    """The options of the program, with Horovod's names."""
    made = argparse.ArgumentParser(description="Runs a rank of a compute job of tf.data's service.")
    made.add_argument("configfile", help="file to write, from which training processes read the addresses")
    made.add_argument("--dispatchers", default=1, type=int, help="one for all ranks, or one for each")
    made.add_argument(
        "--dispatcher-side", default="compute", choices=("compute", "training"), help="where they run"
    )
    made.add_argument("--timeout", default=60, type=int, help="seconds in which all processes have to start")
    made.add_argument(
        "--keep-running", action="store_true", help="serve further training jobs when one has ended"
    )
    return made


def _run(args: Sequence[str] | None = None) -> None:
    given = parser().parse_args(args)
    main(given.dispatchers, given.dispatcher_side, given.configfile, given.timeout, given.keep_running)


if __name__ == "__main__":
    _run()
