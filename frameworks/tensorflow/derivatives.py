"""The gradients of the collectives: derivatives of the sum of all ranks' losses.

Each is a collective itself, named after the one it belongs to, and runs on every rank of the set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow.errors import invalid
from polyhvd.tensorflow.native import library
from polyhvd.tensorflow.ops import bits, number, run_op

from polyhvd import context
from polyhvd.adapter import OpKind, ReduceOp

__all__ = []  # TensorFlow finds them by the names of ops

Gradients = Sequence[Any]


def _attribute(op: Any, name: str) -> Any:
    value = op.get_attr(name)
    return value.decode() if isinstance(value, bytes) else value


def _run(run: Callable[..., Any], kind: OpKind, op: Any, suffix: str, **arguments: Any) -> Any:
    name = f"{_attribute(op, 'tensor_name')}.{suffix}"
    process_set, priority = _attribute(op, "process_set"), _attribute(op, "priority")
    return run_op(run, kind, name, process_set, priority, **arguments)


def _differentiable(op: Any) -> list[int]:
    """Positions of the tensors that have gradients: the same on every rank, as the types are."""
    return [i for i, output in enumerate(op.outputs) if output.dtype.is_floating]


def _dense(op: Any, gradients: Gradients, positions: Sequence[int]) -> list[tf.Tensor]:
    """The gradients at some positions; zeros for results that the loss does not depend on."""
    return [
        tf.zeros_like(op.outputs[i]) if gradients[i] is None else tf.convert_to_tensor(gradients[i])
        for i in positions
    ]


def _at(positions: Sequence[int], values: Sequence[Any], op: Any) -> list[Any]:
    results: list[Any] = [None] * len(op.outputs)
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


def _sum(op: Any, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    return list(
        _run(
            library.polyhvd_allreduce,
            OpKind.ALLREDUCE,
            op,
            "grad",
            tensors=tensors,
            reduce_op=int(ReduceOp.Sum),
            prescale_bits=bits(1.0),
            postscale_bits=bits(1.0),
        )
    )


@tf.RegisterGradient("PolyhvdAllreduce")
def _allreduce_gradient(op: Any, *gradients: Any) -> list[Any]:
    """A weighted sum is its own adjoint."""
    reduction, positions = _linear_reduction(op), _differentiable(op)
    if not positions:
        return [None] * len(op.outputs)
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
        return [None] * len(op.outputs)
    scale = number(_attribute(op, "prescale_bits")) * number(_attribute(op, "postscale_bits"))
    if reduction == ReduceOp.Average:
        scale /= len(context.registered()[_attribute(op, "process_set")])
    tensors = _dense(op, gradients, positions)
    gathered = _run(library.polyhvd_allgather, OpKind.ALLGATHER, op, "grad", tensors=tensors)
    results = [value * tf.cast(scale, value.dtype) for value in gathered]
    for i, result in zip(positions, results, strict=True):
        result.set_shape(op.inputs[i].shape)
    return _at(positions, results, op)


@tf.RegisterGradient("PolyhvdBroadcast")
def _broadcast_gradient(op: Any, *gradients: Any) -> list[Any]:
    """The root has the sum of all ranks' gradients; the others' inputs do not matter."""
    positions = _differentiable(op)
    if not positions:
        return [None] * len(op.outputs)
    reduced = _sum(op, _dense(op, gradients, positions))
    if context.config().rank != _attribute(op, "root_rank"):
        reduced = [tf.zeros_like(gradient) for gradient in reduced]
    return _at(positions, reduced, op)


@tf.RegisterGradient("PolyhvdAllgather")
def _allgather_gradient(op: Any, *gradients: Any) -> list[Any]:
    """This rank's rows of the sum of all ranks' gradients."""
    positions = _differentiable(op)
    if not positions:
        return [None] * len(op.outputs)
    rank = context.config().rank
    rows = [tf.shape(op.inputs[i], out_type=tf.int64)[0] for i in positions]
    (table,) = _run(
        library.polyhvd_allgather,
        OpKind.ALLGATHER,
        op,
        "rows",
        tensors=[tf.stack([[tf.constant(rank, tf.int64), *rows]])],
    )
    before = tf.reduce_sum(tf.where(table[:, :1] < rank, table[:, 1:], 0), axis=0)
    results = []
    for k, reduced in enumerate(_sum(op, _dense(op, gradients, positions))):
        mine = reduced[before[k] : before[k] + rows[k]]
        mine.set_shape(op.inputs[positions[k]].shape)
        results.append(mine)
    return _at(positions, results, op)


@tf.RegisterGradient("PolyhvdAlltoall")
def _alltoall_gradient(op: Any, gradient: Any, _: Any) -> list[Any]:
    """Rows go back to where they came from; what was not sent has a gradient of zero."""
    source = op.inputs[0]
    if not source.dtype.is_floating:
        return [None, None]
    returned, _ = _run(
        library.polyhvd_alltoall,
        OpKind.ALLTOALL,
        op,
        "grad",
        tensor=_dense(op, [gradient], [0])[0],
        splits=op.outputs[1],
        has_splits=1,
    )
    if _attribute(op, "has_splits"):
        kept = tf.shape(source)[0] - tf.shape(returned)[0]
        rest = tf.zeros(tf.concat([[kept], tf.shape(source)[1:]], axis=0), source.dtype)
        returned = tf.concat([returned, rest], axis=0)
    returned.set_shape(source.shape)
    return [returned, None]


for _op_name in ("PolyhvdBarrier", "PolyhvdJoin"):
    tf.no_gradient(_op_name)
