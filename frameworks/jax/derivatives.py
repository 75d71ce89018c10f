"""The collectives as ``jax.grad`` and ``jax.jit`` see them: done now, or recorded; with derivatives.

A derivative is a collective, too: every rank that takes part in the forward runs it, in the same order.
It is scaled by the factors of polyhvd.collectives.adjoints, and its name follows from the forward's. Outside
of ``jax.jit`` both are done while Python runs, so that shapes may depend on other ranks; see traced.py for
inside.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from polyhvd.jax import traced
from polyhvd.jax.adapter import JaxAdapter

from polyhvd.collectives.adapter import OpKind, ReduceOp
from polyhvd.collectives.adjoints import gradient_factor, rows_before, rows_kept
from polyhvd.collectives.functions import Functions
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import Collectives, splits_of
from polyhvd.errors import InvalidArgumentError, UnsupportedError
from polyhvd.runtime import current

__all__ = ["allgather", "allreduce", "alltoall", "broadcast", "is_recorded", "reducescatter"]

Arrays = Sequence[jax.Array]

_now: Functions[jax.Array] = Functions(Collectives(JaxAdapter()))


def is_recorded(tensors: Arrays) -> bool:
    """Return whether the arrays are none that can be sent now."""
    return traced.is_staging() or any(isinstance(tensor, jax.core.Tracer) for tensor in tensors)


def _record(
    kind: OpKind,
    tensors: Arrays,
    shapes: Sequence[tuple[int, ...]],
    name: str | None,
    process_set: ProcessSet,
    **more: Any,
) -> list[jax.Array]:
    """Record a collective whose results have these shapes, and the arrays' element types."""
    label = f"{kind.name.lower()} {name or 'without a name'!r}"
    process_set_id(process_set, process_set.world or current.world())
    if not process_set.included():
        raise InvalidArgumentError(f"{label}: this rank is not in {process_set}")
    dtypes = [tensor.dtype for tensor in tensors] + [np.dtype(np.int32)]  # of an alltoall's rows
    results = tuple(jax.ShapeDtypeStruct(shape, d) for shape, d in zip(shapes, dtypes, strict=False))
    place: dict[str, Any] = {"size": process_set.size(), "position": process_set.rank()}
    return traced.run(traced.Collective(kind, name, process_set, results, **more, **place), tensors)


def _rows_of(tensors: Arrays, verb: str, name: str | None) -> list[int]:
    for tensor in tensors:
        if not tensor.ndim:
            raise InvalidArgumentError(f"{verb} {name or 'without a name'!r}: an array without dimensions")
    return [tensor.shape[0] for tensor in tensors]


def _gradient_name(name: str | None) -> str | None:
    return None if name is None else f"{name}.gradient"


def _check_linear(verb: str, op: int) -> None:
    if op not in (ReduceOp.Average, ReduceOp.Sum):
        raise InvalidArgumentError(
            f"op={ReduceOp(op).name}: {verb} has a gradient only for Average and Sum; use one of them, or "
            "jax.lax.stop_gradient()"
        )


def _differentiable(
    verb: str,
    name: str | None,
    tensors: Arrays,
    forward: Callable[[Arrays], Arrays],
    backward: Callable[[Arrays, list[int]], Arrays],
) -> list[jax.Array]:
    """Results of ``forward``, which JAX can differentiate in reverse.

    Args:
        verb, name: of the operation, for messages.
        tensors: what is sent.
        forward: from these to the results, the first of which belong to the tensors in order.
        backward: from gradients of results to those of tensors, at these positions.
    """
    chosen = [i for i, tensor in enumerate(tensors) if jnp.issubdtype(tensor.dtype, jnp.floating)]
    # A compiled function lives in every world, what is done now in one.
    generation = None if traced.is_staging() else current.world().placement.generation

    def derive(_: None, gradients: Arrays) -> tuple[Any, ...]:
        if generation is not None:
            current.of_generation(generation, f"the gradient of {verb} {name or 'without a name'!r}")
        results: list[Any] = [None] * len(tensors)
        if chosen:
            for i, gradient in zip(chosen, backward([gradients[i] for i in chosen], chosen), strict=True):
                results[i] = gradient
        return tuple(results)

    collective = jax.custom_vjp(lambda *given: tuple(forward(given)))

    def begin(*given: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
        # Only for second derivatives in its own terms: JAX may drop what has a derivative and no use.
        return collective(*given) if traced.are_differentiated(given) else tuple(forward(given)), None

    collective.defvjp(begin, derive)
    return list(collective(*tensors))


def allreduce(
    tensors: Arrays,
    name: str | None = None,
    op: int = ReduceOp.Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    priority: int = 0,
    names: Callable[[], Sequence[str]] | None = None,
) -> list[jax.Array]:
    """Arrays reduced as one operation. The gradient of a sum is the sum of the ranks' gradients.

    Args:
        names: returns those of gradients, to be compared between ranks.
    """

    def forward(given: Arrays) -> Arrays:
        if not is_recorded(given):
            return _now.allreduce_group(
                given,
                name=name,
                op=op,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                process_set=process_set,
                priority=priority,
            )
        more: dict[str, Any] = {"prescale": prescale_factor, "postscale": postscale_factor}
        more |= {"op": op, "priority": priority, "names": names}
        return _record(OpKind.ALLREDUCE, given, [tensor.shape for tensor in given], name, process_set, **more)

    def backward(gradients: Arrays, _: list[int]) -> Arrays:
        _check_linear("allreduce", op)
        label = _gradient_name(name)
        return allreduce(gradients, label, op, prescale_factor, postscale_factor, process_set, priority)

    return _differentiable("allreduce", name, tensors, forward, backward)


def allgather(
    tensors: Arrays,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
    known: Sequence[Sequence[int]] | None = None,
) -> list[jax.Array]:
    """The ranks' arrays, concatenated, as one operation.

    The gradient of a rank's rows is the sum of all ranks' gradients of these rows.

    Args:
        known: the rows that each member has of each array; None: to be found out, and equal where recorded.
    """
    rows = _rows_of(tensors, "allgather", name)
    totals = [sum(each) for each in known] if known else [count * process_set.size() for count in rows]

    def forward(given: Arrays) -> Arrays:
        if not is_recorded(given):
            results = _now.allgather_group(given, name=name, process_set=process_set)
            totals[:] = [result.shape[0] for result in results]
            return results
        shapes = [(total, *tensor.shape[1:]) for total, tensor in zip(totals, given, strict=True)]
        return _record(OpKind.ALLGATHER, given, shapes, name, process_set, check_rows=known is None)

    def backward(gradients: Arrays, chosen: list[int]) -> Arrays:
        counts = [rows[i] for i in chosen]
        own, size, label = process_set.rank(), process_set.size(), _gradient_name(name)
        if known is not None:
            before = [sum(known[i][:own]) for i in chosen]
        elif traced.is_staging():
            before = [own * count for count in counts]
        else:
            # With the rank, since those that have joined are missing from it.
            table = _gathered_numbers([own, *counts], label and f"{label}.rows", process_set)
            before = rows_before(table, own, size, [totals[i] for i in chosen], name or "without a name")
        factor = gradient_factor(OpKind.ALLGATHER, size, exact_gradient)
        sums = allreduce(gradients, label, ReduceOp.Sum, 1.0, factor, process_set)
        return [t[begin : begin + count] for t, begin, count in zip(sums, before, counts, strict=True)]

    return _differentiable("allgather", name, tensors, forward, backward)


def broadcast(
    tensor: jax.Array,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> jax.Array:
    """The root's array. The gradient of that is the sum of all ranks' gradients; of others, zero."""

    def forward(given: Arrays) -> Arrays:
        if not is_recorded(given):
            return [_now.broadcast_one(given[0], root_rank, name=name, process_set=process_set)]
        return _record(OpKind.BROADCAST, given, [given[0].shape], name, process_set, root=root_rank)

    def backward(gradients: Arrays, _: list[int]) -> Arrays:
        factor = gradient_factor(OpKind.BROADCAST, process_set.size(), exact_gradient)
        label = _gradient_name(name)
        (total,) = allreduce(gradients, label, ReduceOp.Sum, 1.0, factor, process_set)
        # Zeros that depend on the sum: its own gradient is a collective of every rank.
        return [jnp.where(global_process_set.rank() == root_rank, total, jnp.zeros_like(total))]

    return _differentiable("broadcast", name, (tensor,), forward, backward)[0]


def reducescatter(
    tensors: Arrays,
    name: str | None = None,
    op: int = ReduceOp.Average,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    exact_gradient: bool | None = None,
) -> list[jax.Array]:
    """This rank's rows of reduced arrays, as one operation.

    The gradient of a term is that of its sum: every rank gathers the gradients of all rows.
    """
    rows = _rows_of(tensors, "reducescatter", name)

    def forward(given: Arrays) -> Arrays:
        if not is_recorded(given):
            return _now.reducescatter_group(
                given,
                name=name,
                op=op,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                process_set=process_set,
            )
        own, size = process_set.rank(), process_set.size()
        shapes = [(rows_kept(t.shape[0], size)[own], *t.shape[1:]) for t in given]
        factors = {"prescale": prescale_factor, "postscale": postscale_factor}
        return _record(OpKind.REDUCESCATTER, given, shapes, name, process_set, op=op, **factors)

    def backward(gradients: Arrays, chosen: list[int]) -> Arrays:
        _check_linear("reducescatter", op)
        size, label = process_set.size(), _gradient_name(name)
        factor = prescale_factor * postscale_factor
        factor *= gradient_factor(OpKind.REDUCESCATTER, size, exact_gradient, op)
        scaled = [gradient if factor == 1 else gradient * factor for gradient in gradients]
        kept = [rows_kept(rows[i], size) for i in chosen]
        gathered = allgather(scaled, label, process_set, exact_gradient, kept)
        if all(t.shape[0] == rows[i] for t, i in zip(gathered, chosen, strict=True)):
            return gathered
        # Ranks have joined; all others know it, and take part in this.
        members = [
            rank
            for (rank,) in _gathered_numbers([process_set.rank()], label and f"{label}.ranks", process_set)
        ]
        places = zip(gathered, kept, chosen, strict=True)
        return [_in_their_places(t, counts, members, rows[i]) for t, counts, i in places]

    return _differentiable("reducescatter", name, tensors, forward, backward)


def alltoall(
    tensor: jax.Array,
    splits: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[jax.Array, jax.Array]:
    """The rows that all ranks have sent, and how many came from each.

    The gradients of rows travel back to the rank that has sent them.
    """
    result, counts, _ = _exchange(tensor, splits, name, process_set)
    return result, counts


def _exchange(
    tensor: jax.Array, splits: Any, name: str | None, process_set: ProcessSet
) -> tuple[jax.Array, jax.Array, list[int]]:
    """Return the rows, their numbers from each rank, and these as integers, or none if it was recorded."""
    (rows,) = _rows_of((tensor,), "alltoall", name)
    received: list[int] = []

    def forward(given: Arrays) -> Arrays:
        if not is_recorded(given):
            result, counts = _now.synchronize(
                _now.collectives.alltoall_async(
                    given[0], splits, blocking=True, name=name, process_set=process_set
                )
            )
            received[:] = counts.tolist()
            return result, counts
        size = process_set.size()
        label = f"alltoall {name or 'without a name'!r}"
        if splits is not None:
            raise UnsupportedError(
                f"{label}: in a compiled function the parts are equal, since a result's shape is known "
                "beforehand; leave splits out, or call it outside of jax.jit"
            )
        if rows % size:
            raise InvalidArgumentError(f"{label}: {rows} rows: {size} ranks cannot share them equally")
        return _record(OpKind.ALLTOALL, given, [given[0].shape, (size,)], name, process_set)

    def backward(gradients: Arrays, _: list[int]) -> Arrays:
        (gradient,) = gradients
        returned, _counts, come = _exchange(gradient, received or None, _gradient_name(name), process_set)
        if returned.shape[0] == rows:
            return [returned]
        members = [position for position, count in enumerate(come) if count]
        parts = splits_of(splits) or [rows // len(come)] * len(come)
        return [_in_their_places(returned, parts, members, rows)]

    result, counts = _differentiable("alltoall", name, (tensor,), forward, backward)
    return result, counts, received


def _gathered_numbers(numbers: list[int], name: str | None, process_set: ProcessSet) -> list[list[int]]:
    """Gather a few numbers of each member."""
    own = jnp.asarray(np.array([numbers], np.int32))
    table: list[list[int]] = _now.allgather(own, name=name, process_set=process_set).tolist()
    return table


def _in_their_places(
    values: jax.Array, counts: Sequence[int], members: Collection[int], rows: int
) -> jax.Array:
    """``rows`` rows, of which those of ``members`` are given; zeros for all others, and at the end."""
    parts, begin = [], 0
    for position, count in enumerate(counts):
        if position in members:
            parts.append(values[begin : begin + count])
            begin += count
        else:
            parts.append(jnp.zeros((count, *values.shape[1:]), values.dtype))
    parts.append(jnp.zeros((rows - sum(counts), *values.shape[1:]), values.dtype))
    return jnp.concatenate(parts)
