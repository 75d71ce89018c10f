"""The gradients of the collectives, scaled by polyhvd.collectives.adjoints.

Each is a collective itself, named after the one it belongs to, and runs on every rank of the set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from polyhvd.tensorflow import generations
from polyhvd.tensorflow.errors import invalid
from polyhvd.tensorflow.native import library
from polyhvd.tensorflow.ops import bits, number, run_op

from polyhvd.collectives.adapter import OpKind, ReduceOp
from polyhvd.collectives.adjoints import gradient_factor
from polyhvd.runtime import current

__all__ = []  # TensorFlow finds them by the names of ops

Gradients = Sequence[Any]


def _attribute(op: Any, name: str) -> Any:
    value = op.get_attr(name)
    return value.decode() if isinstance(value, bytes) else value


def _run(run: Callable[..., Any], kind: OpKind, op: Any, suffix: str, **arguments: Any) -> Any:
    forward = _attribute(op, "tensor_name")
    name = f"{forward}.{suffix}" if forward else None
    process_set, priority = _attribute(op, "process_set"), _attribute(op, "priority")
    generation = generations.of_operation(op, _tensors_of(op))
    return run_op(run, kind, name, process_set, priority, generation=generation, **arguments)


def _tensors_of(op: Any) -> int:
    """How many inputs a collective has, but for the generation that it was made for."""
    return len(op.outputs)  # an alltoall has two of either


def _differentiable(op: Any) -> list[int]:
    """Positions of the tensors that have gradients: the same on every rank, as the types are."""
    return [i for i, output in enumerate(op.outputs) if output.dtype.is_floating]


def _dense(op: Any, gradients: Gradients, positions: Sequence[int]) -> list[tf.Tensor]:
    """The gradients at some positions; zeros for results that the loss does not depend on.

    A tape takes ``output_gradients`` of any type: they are cast to that of the results.
    """
    return [
        tf.zeros_like(op.outputs[i])
        if gradients[i] is None
        else tf.cast(tf.convert_to_tensor(gradients[i]), op.outputs[i].dtype)
        for i in positions
    ]


def _at(positions: Sequence[int], values: Sequence[Any], op: Any) -> list[Any]:
    results: list[Any] = [None] * len(op.inputs)
    for i, value in zip(positions, values, strict=True):
        results[i] = value
    return results


def _linear_reduction(op: Any) -> int:
    reduction = int(_attribute(op, "reduce_op"))
    if reduction not in (ReduceOp.Average, ReduceOp.Sum):
        raise invalid(
            f"{_attribute(op, 'tensor_name')!r} with op={ReduceOp(reduction).name} has no gradient; use "
            "Average or Sum, or tf.stop_gradient"
        )
    return reduction


def _ranks_of(op: Any) -> tuple[Any, Any]:
    """This rank, and the ranks of the process set, when the gradient runs: int32.

    A function is not traced again when an elastic world changes.
    """
    process_set = _attribute(op, "process_set")

    def read(*_: Any) -> Any:
        world = current.find()
        if world is None:  # the collective of the gradient reports it
            return np.array([0, 0], np.int32)
        return np.array([world.placement.rank, *world.process_sets().get(process_set, [0])], np.int32)

    if tf.executing_eagerly() or not tf.compat.v1.executing_eagerly_outside_functions():
        ranks = tf.constant(read())
    else:
        # The input prevents constant folding; without effects, tf.vectorized_map() runs it only once.
        inputs = generations.of_operation(op, _tensors_of(op))
        ranks = tf.numpy_function(read, inputs, tf.int32, stateful=not inputs)
        ranks.set_shape([None])
    return ranks[0], ranks[1:]


def _is_exact(op: Any) -> bool | None:
    exact = _attribute(op, "exact_gradient")
    return None if exact < 0 else bool(exact)


def _in_their_places(values: tf.Tensor, counts: tf.Tensor, present: tf.Tensor, rows: Any) -> tf.Tensor:
    """``rows`` rows, of which those of some ranks are given; zeros for all others, and at the end.

    Args:
        values: the rows of those ranks, one after the other.
        counts: int32 rows of each rank.
        present: bool for each rank, whether its rows are given.
        rows: int32, at least the sum of ``counts``.
    """

    def placed() -> tf.Tensor:
        given = tf.repeat(present, counts)
        given = tf.concat([given, tf.zeros([rows - tf.size(given)], tf.bool)], axis=0)
        # After the last row comes one of zeros for all that are missing.
        places = tf.where(given, tf.cumsum(tf.cast(given, tf.int32)) - 1, tf.shape(values)[0])
        nothing = tf.zeros(tf.concat([[1], tf.shape(values)[1:]], axis=0), values.dtype)
        return tf.gather(tf.concat([values, nothing], axis=0), places)

    return tf.cond(tf.equal(tf.shape(values)[0], rows), lambda: tf.identity(values), placed)


def _sum(op: Any, kind: OpKind, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The sum of the ranks' gradients, or what Horovod divides by the size: the average."""
    is_sum = gradient_factor(kind, 2, _is_exact(op)) == 1.0
    return list(
        _run(
            library.polyhvd_allreduce,
            OpKind.ALLREDUCE,
            op,
            "grad",
            tensors=tensors,
            reduce_op=int(ReduceOp.Sum if is_sum else ReduceOp.Average),
            prescale_bits=bits(1.0),
            postscale_bits=bits(1.0),
        )
    )


@tf.RegisterGradient("PolyhvdAllreduce")
def _allreduce_gradient(op: Any, *gradients: Any) -> list[Any]:
    """A weighted sum is its own adjoint."""
    reduction, positions = _linear_reduction(op), _differentiable(op)
    if not positions:
        return [None] * len(op.inputs)
    reduced = _run(
        library.polyhvd_allreduce,
        OpKind.ALLREDUCE,
        op,
        "grad",
        tensors=_dense(op, gradients, positions),
        reduce_op=reduction,
        prescale_bits=_attribute(op, "prescale_bits"),
        postscale_bits=_attribute(op, "postscale_bits"),
    )
    return _at(positions, reduced, op)


@tf.RegisterGradient("PolyhvdReducescatter")
def _reducescatter_gradient(op: Any, *gradients: Any) -> list[Any]:
    """Every rank's rows of the gradient, together and scaled as the sum was."""
    reduction, positions = _linear_reduction(op), _differentiable(op)
    if not positions:
        return [None] * len(op.inputs)
    rank, members = _ranks_of(op)
    size = tf.size(members)
    scale = tf.constant(
        number(_attribute(op, "prescale_bits")) * number(_attribute(op, "postscale_bits")), tf.float64
    )
    factor = gradient_factor(OpKind.REDUCESCATTER, 2, _is_exact(op), reduction)
    if factor > 1.0:
        scale *= tf.cast(size, tf.float64)
    elif factor < 1.0:
        scale /= tf.cast(size, tf.float64)
    *gathered, ranks = _run(
        library.polyhvd_allgather,
        OpKind.ALLGATHER,
        op,
        "grad",
        # With the rank, since those that have joined are missing.
        tensors=[*_dense(op, gradients, positions), rank[None]],
        exact_gradient=_attribute(op, "exact_gradient"),
    )
    present = tf.reduce_any(tf.equal(ranks[:, None], members), axis=0)
    results = []
    for i, value in zip(positions, gathered, strict=True):
        rows = tf.shape(op.inputs[i])[0]
        counts = rows // size + tf.cast(tf.range(size) < rows % size, tf.int32)  # as of adjoints.rows_kept()
        result = _in_their_places(value, counts, present, rows) * tf.cast(scale, value.dtype)
        result.set_shape(op.inputs[i].shape)
        results.append(result)
    return _at(positions, results, op)


@tf.RegisterGradient("PolyhvdBroadcast")
def _broadcast_gradient(op: Any, *gradients: Any) -> list[Any]:
    """The root has the sum of all ranks' gradients; the others' inputs do not matter."""
    positions = _differentiable(op)
    if not positions:
        return [None] * len(op.inputs)
    reduced = _sum(op, OpKind.BROADCAST, _dense(op, gradients, positions))
    rank, _ = _ranks_of(op)
    is_root = tf.equal(rank, _attribute(op, "root_rank"))
    # Zeros that depend on the sum: its own gradient is a collective of every rank.
    own = [tf.where(is_root, gradient, tf.zeros_like(gradient)) for gradient in reduced]
    return _at(positions, own, op)


@tf.RegisterGradient("PolyhvdAllgather")
def _allgather_gradient(op: Any, *gradients: Any) -> list[Any]:
    """This rank's rows of the sum of all ranks' gradients."""
    positions = _differentiable(op)
    if not positions:
        return [None] * len(op.inputs)
    rank, members = _ranks_of(op)
    size = tf.size(members, tf.int64)
    own = tf.reduce_sum(tf.where(tf.equal(members, rank), tf.range(size), 0))  # the position in the set
    rows = [tf.shape(op.inputs[i], out_type=tf.int64)[0] for i in positions]
    (table,) = _run(
        library.polyhvd_allgather,
        OpKind.ALLGATHER,
        op,
        "rows",
        tensors=[tf.stack([[own, *rows]])],
    )
    sums = _sum(op, OpKind.ALLGATHER, _dense(op, gradients, positions))
    totals = tf.stack([tf.shape(op.outputs[i], out_type=tf.int64)[0] for i in positions])
    with tf.control_dependencies(sums):  # where this step fails now, no other rank waits for it
        table = tf.identity(table)
    before = _rows_before(op, table, own, size, totals)
    results = []
    for k, reduced in enumerate(sums):
        mine = reduced[before[k] : before[k] + rows[k]]
        mine.set_shape(op.inputs[positions[k]].shape)
        results.append(mine)
    return _at(positions, results, op)


def _rows_before(op: Any, table: tf.Tensor, own: tf.Tensor, size: tf.Tensor, totals: tf.Tensor) -> tf.Tensor:
    """:func:`polyhvd.collectives.adjoints.rows_before` of a table that a graph will know."""
    positions, rows = table[:, 0], table[:, 1:]
    before = tf.reduce_sum(tf.where(table[:, :1] < own, rows, 0), axis=0)

    def without_joined() -> tf.Tensor:
        missing = totals - tf.reduce_sum(rows, axis=0)
        members = tf.range(size)
        is_joined = tf.reduce_all(tf.not_equal(members[:, None], positions), axis=1)
        joined = tf.boolean_mask(members, is_joined)
        together = joined[-1] - joined[0] + 1 == tf.size(joined, tf.int64)
        known = tf.debugging.Assert(
            together | tf.reduce_all(missing == 0),
            [
                f"allgather {_attribute(op, 'tensor_name')!r}: ranks have joined between it and its "
                "gradient, of those at",
                joined,
                "in the process set, so the ranks of the rows are unknown; call join() after the gradients",
            ],
        )
        with tf.control_dependencies([known]):
            return before + tf.where(joined[0] < own, missing, tf.zeros_like(missing))

    return tf.cond(
        tf.equal(tf.shape(table, out_type=tf.int64)[0], size), lambda: tf.identity(before), without_joined
    )


@tf.RegisterGradient("PolyhvdAlltoall")
def _alltoall_gradient(op: Any, gradient: Any, _: Any) -> list[Any]:
    """Rows go back to where they came from; what was not sent has a gradient of zero."""
    source = op.inputs[0]
    if not source.dtype.is_floating:
        return [None] * len(op.inputs)
    returned, received = _run(
        library.polyhvd_alltoall,
        OpKind.ALLTOALL,
        op,
        "grad",
        tensor=_dense(op, [gradient], [0])[0],
        splits=op.outputs[1],
        has_splits=1,
    )
    rows, size = tf.shape(source)[0], tf.size(_ranks_of(op)[1])
    has_splits = _attribute(op, "has_splits")
    splits = tf.cast(op.inputs[1], tf.int32) if has_splits else tf.repeat(rows // size, size)
    returned = _in_their_places(returned, splits, received > 0, rows)
    returned.set_shape(source.shape)
    return _at([0], [returned], op)


for _op_name in ("PolyhvdBarrier", "PolyhvdGeneration", "PolyhvdJoin"):
    tf.no_gradient(_op_name)
