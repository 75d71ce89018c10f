"""The devices that Spark has assigned to the task of this rank."""

from __future__ import annotations

from polyhvd.config import Launched

__all__ = ["get_available_devices"]


def get_available_devices() -> list[str]:
    """Return the ids of the GPUs that Spark has assigned to this rank, or to the task that calls.

    Returns:
        What Spark's discovery script has named them, such as ``["2"]``; empty without GPUs, and in a process
        that is neither a rank of :func:`polyhvd.spark.run` nor a task.

    Example::

        polyhvd.spark.run(lambda: polyhvd.spark.task.get_available_devices())  # [["0"], ["1"]]
    """
    from pyspark import TaskContext  # ranks of other jobs need no Spark

    context = TaskContext.get()
    if context is None:
        return list(filter(None, Launched.from_environment().devices.split(",")))
    gpus = context.resources().get("gpu")
    return [] if gpus is None else list(gpus.addresses)
