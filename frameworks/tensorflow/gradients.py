"""Which gradients verbs, optimizers and tapes take, and which they refuse."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow.errors import as_tensorflow, invalid

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.verbs import resolve_op
from polyhvd.training.options import Options

__all__ = ["TensorflowOptions", "accept_device", "as_dense", "reduction_of"]


def accept_device(where: str, **devices: str) -> None:
    """Take Horovod's ``device_dense`` and ``device_sparse``, where the host is meant."""
    for name, device in devices.items():
        if device and "cpu" not in device.lower():
            raise invalid(f"{where}({name}={device!r}): collectives run on the host; leave it at ''")


def reduction_of(op: int | None, average: bool | None = None) -> int:
    """See :func:`polyhvd.collectives.verbs.resolve_op`."""
    with as_tensorflow():
        return resolve_op(op, average)


class TensorflowOptions(Options):
    """Options whose errors are TensorFlow's, too."""

    def __post_init__(self, ops: Sequence[ReduceOp]) -> None:
        with as_tensorflow():
            super().__post_init__(ops)


def as_dense(tensor: Any, what: str, *, sparse_as_dense: bool = False) -> tf.Tensor:
    """A tensor; of tf.IndexedSlices only if the caller agrees to the size."""
    if isinstance(tensor, tf.Tensor):
        return tensor
    if isinstance(tensor, tf.IndexedSlices) and not sparse_as_dense:
        raise invalid(
            f"{what} is a tf.IndexedSlices, which only allreduce() and grouped_allreduce() take; convert it "
            "with tf.convert_to_tensor()"
        )
    return tf.convert_to_tensor(tensor)
