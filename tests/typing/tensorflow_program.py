"""What a user writes with polyhvd.tensorflow, as a type checker sees it: TensorFlow itself has no types."""

from __future__ import annotations

import polyhvd.keras
import polyhvd.tensorflow as hvd
import polyhvd.tensorflow.keras
import tensorflow as tf
from typing_extensions import assert_type


class Own:
    """Stands for a class of optimizers."""


def main(model: tf.keras.Model) -> None:
    hvd.init()
    hvd.broadcast_variables(model.variables, root_rank=0)
    loss = hvd.allreduce(tf.constant(1.0), op=hvd.Average, name="loss", compression=hvd.Compression.bf16)
    rows, _ = hvd.alltoall(tf.ones((4, 2)), splits=[2, 2])
    both = hvd.grouped_allgather([loss[None], rows])
    assert len(both) == 2
    assert_type(hvd.poll(hvd.broadcast_async(rows, 0)), bool)
    assert_type(hvd.DistributedOptimizer(Own()), Own)
    assert_type(polyhvd.keras.DistributedOptimizer(Own()), Own)
    assert_type(polyhvd.tensorflow.keras.DistributedOptimizer(Own()), Own)
    hvd.allreduce(rows, opp=hvd.Sum)  # type: ignore[call-arg]
    hvd.broadcast(rows)  # type: ignore[call-arg]
    hvd.allreduce(rows, name=3)  # type: ignore[arg-type]
