"""A compute job of tf.data's service on Spark: ``spark-submit compute_worker.py FILE``, or :func:`main`.

Each task is a worker, and this process, the driver, serves the addresses. FILE is for the training job: see
``polyhvd docs data``.
"""

from __future__ import annotations

import sys
from importlib import import_module

from polyhvd.spark.cluster import find
from polyhvd.spark.running import run, wanted_size

compute_service = import_module("polyhvd.tensorflow.data.compute_service")
compute_worker = import_module("polyhvd.tensorflow.data.compute_worker")

__all__ = ["main"]


def main(
    dispatchers: int,
    dispatcher_side: str,
    configfile: str,
    timeout: int,
    keep_running: bool = False,
    num_proc: int | None = None,
) -> None:
    """Run a compute job on tasks of the session of this process, until the training job has ended.

    Args:
        dispatchers: how many there are; the number of tasks is a multiple of it.
        dispatcher_side: where they run: ``"compute"`` or ``"training"``.
        configfile: the file that training processes read.
        timeout: seconds in which all processes have to start.
        keep_running: whether to serve further training jobs when one has ended.
        num_proc: number of tasks; None: as many as can run at once.

    Raises:
        ValueError: an argument cannot be used.
        OSError: the file cannot be written.
        RuntimeError: a task was lost, or there is no session of Spark.
        TimeoutError: the tasks could not start in time.

    Example::

        main(1, "compute", "/shared/compute.json", timeout=60)
    """
    caller = "polyhvd.spark.tensorflow.compute_worker"
    size = wanted_size(find(caller), num_proc, caller)
    each = compute_worker.workers_of_each(size, dispatchers)
    service = compute_service.ComputeService(dispatchers, each, keep_running=keep_running)
    try:
        config = compute_service.TfDataServiceConfig(
            dispatchers, each, dispatcher_side, service.addresses(), service.key, timeout
        )
        config.write(configfile)
        run(
            compute_service.compute_worker_fn,
            (config,),
            num_proc=size,
            start_timeout=timeout,
            stdout=sys.stdout,
            stderr=sys.stderr,
        )
    finally:
        compute_worker.remove(configfile, service.key)
        service.shutdown()


def _run() -> None:
    from pyspark.sql import SparkSession

    given = compute_worker.parser().parse_args()
    session = SparkSession.builder.getOrCreate()
    try:
        main(given.dispatchers, given.dispatcher_side, given.configfile, given.timeout, given.keep_running)
    finally:
        session.stop()


if __name__ == "__main__":
    _run()
