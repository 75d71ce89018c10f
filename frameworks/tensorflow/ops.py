"""The collectives on lists of tensors, eager and in graphs; their gradients stand in derivatives.py.

An eager call without a gradient tape goes straight to the core, where the waiting thread drives the
transfer itself. All else goes through the ops of the native library.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from polyhvd.tensorflow import dtypes, generations, names
from polyhvd.tensorflow.adapter import TensorflowAdapter
from polyhvd.tensorflow.errors import as_tensorflow, invalid
from polyhvd.tensorflow.native import library

import polyhvd
from polyhvd.collectives.adapter import Handle, OpKind
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.collectives.verbs import Collectives, process_set_id, splits_of
from polyhvd.runtime import current

__all__ = [
    "adapter",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "bits",
    "broadcast",
    "collectives",
    "join",
    "number",
    "reducescatter",
    "rows_of",
    "run_op",
]

R = TypeVar("R")


class TensorflowCollectives(Collectives[tf.Tensor]):
    """:class:`Collectives`, with errors that are TensorFlow's, too."""

    def _start(self, *args: Any, **kwargs: Any) -> Handle:
        try:
            return super()._start(*args, **kwargs)
        except Exception:
            with as_tensorflow():
                raise

    def synchronize(self, handle: Handle[R]) -> R:
        """Wait for an operation; return its result, or raise what it failed with."""
        try:
            return super().synchronize(handle)
        except Exception:
            with as_tensorflow():
                raise


adapter = TensorflowAdapter()
collectives = TensorflowCollectives(adapter)

#: From here on the op library is faster: its large outputs are memory that was used before. Measured on
#: two ranks, in us: 64 KiB 40 (op 104), 1 MiB 120 (171), 4 MiB 890 (422), 16 MiB 9614 (2241).
_DIRECT_BYTES_MAX = 2 << 20

#: In a graph these come after all collectives before them, and before all after them.
_IN_ORDER = frozenset({OpKind.BARRIER, OpKind.JOIN})
_LAST_IN_ORDER = "_polyhvd_last_in_order"
_COLLECTIVES = frozenset(f"Polyhvd{kind.name.capitalize()}" for kind in OpKind)


def bits(value: float) -> int:
    """A double as the integer of the same bits: attributes of ops have single precision only."""
    integer: int = struct.unpack("<q", struct.pack("<d", value))[0]
    return integer


def number(integer: int) -> float:
    """The double of these :func:`bits`."""
    value: float = struct.unpack("<d", struct.pack("<q", integer))[0]
    return value


def _switch(exact_gradient: bool | None) -> int:
    """An argument as the attribute of ops, which derivatives.py reads."""
    return -1 if exact_gradient is None else int(exact_gradient)


def _may_record() -> bool:
    """Return whether a gradient tape or forward accumulator watches this thread."""
    try:
        from tensorflow.python.eager.record import could_possibly_record
    except ImportError:  # its name in other versions is not known
        return True
    return bool(could_possibly_record())


def _goes_direct(tensors: Sequence[tf.Tensor]) -> bool:
    if not tf.executing_eagerly() or _may_record():
        return False
    # num_elements() of a shape: an eager tensor knows it.
    return sum(t.shape.num_elements() * t.dtype.size for t in tensors) < _DIRECT_BYTES_MAX


def _run_direct(start: Callable[..., Any], *inputs: Any, **arguments: Any) -> Any:
    return collectives.synchronize(start(*inputs, blocking=True, **arguments))


def _refuse_xla(kind: str) -> None:
    from tensorflow.python.ops import control_flow_util

    in_xla = getattr(control_flow_util, "GraphOrParentsInXlaContext", None)
    if in_xla is not None and in_xla(tf.compat.v1.get_default_graph()):
        raise invalid(
            f"{kind} in a function that XLA compiles (jit_compile=True): XLA cannot call polyhvd's "
            "collectives. Use tf.function(jit_compile=False), or model.compile(jit_compile=False) in Keras"
        )


def _predecessors(kind: OpKind) -> list[tf.Operation]:
    """Collectives of this graph that are to be done before one of ``kind`` starts."""
    graph = tf.compat.v1.get_default_graph()
    if kind in _IN_ORDER:
        return [op for op in graph.get_operations() if op.type in _COLLECTIVES]
    last = getattr(graph, _LAST_IN_ORDER, None)
    return [] if last is None else [last]


def run_op(
    op: Callable[..., Any],
    kind: OpKind,
    name: str | None,
    process_set: int,
    priority: int = 0,
    generation: Sequence[tf.Tensor] | None = None,
    **arguments: Any,
) -> Any:
    """Call an op of the library under a name that recurs and that ranks agree on.

    Args:
        op: its Python function.
        kind: what it does.
        name: as the caller has given it, or None.
        process_set: its number.
        priority: higher ones go first among those that are ready.
        generation: of a collective that this one is the gradient of, as the op takes it; None: of the call.
        arguments: the op's inputs and other attributes.
    """
    dtypes.check(kind, arguments.get("tensors") or ([arguments["tensor"]] if "tensor" in arguments else []))
    common = {"process_set": process_set, "priority": priority, "where": names.caller_line(), **arguments}
    common["generation"] = generations.of_call() if generation is None else generation
    if tf.executing_eagerly():
        with as_tensorflow():  # the core counts calls without a name when they are executed
            return op(tensor_name=name or "", **common)
    verb = kind.name.lower()
    _refuse_xla(verb)
    if process_set not in current.world().process_sets():
        raise invalid(
            f"{verb}: process set {process_set} does not exist; pass it to init(process_sets=[...]) or "
            "add_process_set() on every rank"
        )
    label = names.in_graph(name, process_set) if name else names.unnamed_in_graph(verb, process_set)
    with tf.control_dependencies(_predecessors(kind)):
        try:
            result = op(tensor_name=label, **common)
        except ValueError as error:  # of shape inference
            raise invalid(str(error)) from None
    if kind in _IN_ORDER:
        operation = result if isinstance(result, tf.Operation) else result.op
        setattr(tf.compat.v1.get_default_graph(), _LAST_IN_ORDER, operation)
    return result


def _number_of(process_set: ProcessSet) -> int:
    current.world()
    with as_tensorflow():
        return process_set_id(process_set)


def allreduce(
    tensors: Sequence[tf.Tensor],
    *,
    name: str | None,
    op: int,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    priority: int = 0,
) -> list[tf.Tensor]:
    """Reduce tensors as one operation: all or none."""
    number = _number_of(process_set)
    if _goes_direct(tensors):
        results: list[tf.Tensor] = _run_direct(
            collectives.grouped_allreduce_async,
            tensors,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            priority=priority,
        )
        return results
    return list(
        run_op(
            library.polyhvd_allreduce,
            OpKind.ALLREDUCE,
            name,
            number,
            priority,
            tensors=tensors,
            reduce_op=int(op),
            prescale_bits=bits(prescale_factor),
            postscale_bits=bits(postscale_factor),
        )
    )


def reducescatter(
    tensors: Sequence[tf.Tensor],
    *,
    name: str | None,
    op: int,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    priority: int = 0,
    exact_gradient: bool | None = None,
) -> list[tf.Tensor]:
    """Reduce tensors as one operation and keep this rank's rows of each."""
    number = _number_of(process_set)
    if _goes_direct(tensors):
        results: list[tf.Tensor] = _run_direct(
            collectives.grouped_reducescatter_async,
            tensors,
            name=name,
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            process_set=process_set,
            priority=priority,
        )
        return results
    return list(
        run_op(
            library.polyhvd_reducescatter,
            OpKind.REDUCESCATTER,
            name,
            number,
            priority,
            tensors=tensors,
            reduce_op=int(op),
            prescale_bits=bits(prescale_factor),
            postscale_bits=bits(postscale_factor),
            exact_gradient=_switch(exact_gradient),
        )
    )


def allgather(
    tensors: Sequence[tf.Tensor],
    *,
    name: str | None,
    process_set: ProcessSet = global_process_set,
    priority: int = 0,
    exact_gradient: bool | None = None,
) -> list[tf.Tensor]:
    """Concatenate the ranks' tensors along their first dimensions, as one operation."""
    number = _number_of(process_set)
    if _goes_direct(tensors):
        results: list[tf.Tensor] = _run_direct(
            collectives.grouped_allgather_async,
            tensors,
            name=name,
            process_set=process_set,
            priority=priority,
        )
        return results
    return list(
        run_op(
            library.polyhvd_allgather,
            OpKind.ALLGATHER,
            name,
            number,
            priority,
            tensors=tensors,
            exact_gradient=_switch(exact_gradient),
        )
    )


def broadcast(
    tensors: Sequence[tf.Tensor],
    root_rank: int,
    *,
    name: str | None,
    process_set: ProcessSet = global_process_set,
    priority: int = 0,
    exact_gradient: bool | None = None,
) -> list[tf.Tensor]:
    """The root's tensors on every rank, as one operation."""
    number = _number_of(process_set)
    if len(tensors) == 1 and _goes_direct(tensors):
        result = _run_direct(
            collectives.broadcast_async,
            tensors[0],
            root_rank,
            name=name,
            process_set=process_set,
            priority=priority,
        )
        return [result]
    return list(
        run_op(
            library.polyhvd_broadcast,
            OpKind.BROADCAST,
            name,
            number,
            priority,
            tensors=tensors,
            root_rank=int(root_rank),
            exact_gradient=_switch(exact_gradient),
        )
    )


def rows_of(splits: Any) -> Any:
    """Splits as a list of numbers, or as a tensor where a graph will know them; None for equal parts."""
    if not isinstance(splits, (tf.Tensor, tf.Variable)):
        with as_tensorflow():
            return splits_of(splits)
    tensor = tf.convert_to_tensor(splits)
    if tensor.dtype not in (tf.int32, tf.int64) or tensor.shape.rank not in (None, 1):
        raise invalid(
            f"splits: expected int32 or int64 in one dimension, found {tensor.dtype.name} {tensor.shape}"
        )
    return splits_of(tensor.numpy()) if tf.executing_eagerly() else tensor


def alltoall(
    tensor: tf.Tensor,
    splits: Any = None,
    *,
    name: str | None,
    process_set: ProcessSet = global_process_set,
    priority: int = 0,
) -> Any:
    """Exchange rows with all ranks; the received ones, and with ``splits`` also their numbers by rank."""
    number = _number_of(process_set)
    rows = rows_of(splits)
    if _goes_direct((tensor,)):
        output, received = _run_direct(
            collectives.alltoall_async, tensor, rows, name=name, process_set=process_set, priority=priority
        )
        return output if splits is None else (output, received)
    if not isinstance(rows, tf.Tensor):
        rows = tf.constant(rows or [], tf.int64)
    output, received = run_op(
        library.polyhvd_alltoall,
        OpKind.ALLTOALL,
        name,
        number,
        priority,
        tensor=tensor,
        splits=rows,
        has_splits=int(splits is not None),
    )
    return output if splits is None else (output, received)


def barrier(process_set: ProcessSet) -> Any:
    """Wait for all ranks; in a graph of tf.compat.v1, the operation that does."""
    if tf.executing_eagerly():
        with as_tensorflow():
            return polyhvd.barrier(process_set)
    operation = run_op(library.polyhvd_barrier, OpKind.BARRIER, None, _number_of(process_set))
    return None if tf.compat.v1.executing_eagerly_outside_functions() else operation


def join() -> Any:
    """Wait until all ranks have run out of data; the last one's number, in a graph a scalar of int32."""
    if tf.executing_eagerly():
        with as_tensorflow():
            return polyhvd.join()
    current.world().has_joined = True  # on every rank that has this graph
    return run_op(library.polyhvd_join, OpKind.JOIN, None, _number_of(global_process_set))
