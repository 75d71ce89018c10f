"""Collectives on values, and the optimizer, with the arguments that Horovod's Keras modules have."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import Compression
from polyhvd.tensorflow.names import do_not_convert

from polyhvd import tensorflow as hvd
from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.training.compression import Compressor

__all__ = [
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allreduce",
    "broadcast",
    "reducescatter",
]


@do_not_convert  # whose locals() would have other names, too
def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = ReduceOp.Average,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Wrap an optimizer of Keras; see :func:`polyhvd.tensorflow.DistributedOptimizer`."""
    return hvd.DistributedOptimizer(**locals())


@do_not_convert  # whose locals() would have other names, too
def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Compressor = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: int = ReduceOp.Average,
    groups: Any = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
) -> Any:
    """Wrap an optimizer of Keras; see :func:`polyhvd.tensorflow.PartialDistributedOptimizer`."""
    return hvd.PartialDistributedOptimizer(**locals())


@do_not_convert
def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: Compressor = Compression.none,
) -> tf.Tensor:
    """Reduce a value (a number, an array or a tensor) over the ranks."""
    return hvd.allreduce(
        tf.convert_to_tensor(value),
        average=average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )


@do_not_convert
def allgather(value: Any, name: str | None = None) -> tf.Tensor:
    """Concatenate the ranks' values along the first dimension."""
    return hvd.allgather(tf.convert_to_tensor(value), name=name)


@do_not_convert
def broadcast(value: Any, root_rank: int, name: str | None = None) -> tf.Tensor:
    """The root's value, on every rank."""
    return hvd.broadcast(tf.convert_to_tensor(value), root_rank, name=name)


@do_not_convert
def reducescatter(value: Any, name: str | None = None, op: int = ReduceOp.Average) -> tf.Tensor:
    """Reduce a value over the ranks, and keep this rank's part of its rows."""
    return hvd.reducescatter(tf.convert_to_tensor(value), op=op, name=name)
