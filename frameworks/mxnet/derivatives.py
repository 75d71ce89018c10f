"""The derivatives of the collectives, for MXNet's autograd, scaled by polyhvd.collectives.adjoints.

They are collectives too, under the name of the forward one with ``.gradient``; every rank runs the
same backward. Nothing here waits for a collective.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import mxnet as mx
import numpy as np
from mxnet.base import _LIB, MXCallbackList, NDArrayHandle, c_handle_array, check_call
from mxnet.ndarray import NDArray
from polyhvd.mxnet import native
from polyhvd.mxnet.errors import InvalidArgumentError
from polyhvd.mxnet.names import derived

from polyhvd.collectives.adapter import Operation, OpKind, ReduceOp
from polyhvd.collectives.adjoints import gradient_factor
from polyhvd.collectives.operation import Call
from polyhvd.runtime import current

__all__ = ["record"]

Arrays = Sequence[NDArray]

_NULL, _ADD = 0, 3  # of mxnet::OpReqType; the others overwrite


def _run(
    forward: Operation, kind: OpKind, inputs: Arrays, shapes: Sequence[Sequence[int]], **changes: Any
) -> Arrays:
    """Start a collective of a backward pass; its outputs have these shapes."""
    call = Call(
        current.world(),
        kind,
        derived(forward.name or "", "gradient"),
        process_set=forward.process_set,
        priority=forward.priority,
        # In another world it fails as lost.
        generation=forward.generation or forward.world.placement.generation,
        **changes,
    )
    outputs = [mx.nd.empty(s, dtype=t.dtype, ctx=t.ctx) for s, t in zip(shapes, inputs, strict=True)]
    native.push(call, inputs, outputs)
    return outputs


def _sum(forward: Operation, gradients: Arrays, **changes: Any) -> Arrays:
    return _run(forward, OpKind.ALLREDUCE, gradients, [g.shape for g in gradients], **changes)


def _factor(forward: Operation) -> float:
    size = len(current.world().process_sets()[forward.process_set])
    return gradient_factor(forward.kind, size, forward.exact_gradient, forward.op)


def _require_linear(forward: Operation) -> None:
    if forward.op not in (ReduceOp.Average, ReduceOp.Sum):
        raise InvalidArgumentError(
            f"{OpKind(forward.kind).name.lower()} '{forward.label}': op={ReduceOp(forward.op).name} has no "
            "gradient; use Average or Sum, or detach() the array"
        )


def _of_allreduce(forward: Operation, shapes: Any, rows: Any, gradients: Arrays) -> Arrays:
    """The ranks' gradients, reduced by the same operation."""
    _require_linear(forward)
    return _sum(forward, gradients, op=forward.op, prescale=forward.prescale, postscale=forward.postscale)


def _of_broadcast(forward: Operation, shapes: Any, rows: Any, gradients: Arrays) -> Arrays:
    """The sum of the ranks' gradients on the root, zero elsewhere."""
    totals = _sum(forward, gradients, postscale=_factor(forward))
    if current.world().placement.rank == forward.root:
        return totals
    return [mx.nd.zeros_like(total) for total in totals]  # MXNet orders it after the reduction


def _of_allgather(
    forward: Operation, shapes: Sequence[Sequence[int]], rows: Sequence[int], gradients: Arrays
) -> Arrays:
    """This rank's rows of the sum of the ranks' gradients; ``rows``: how many come before them."""
    totals = _sum(forward, gradients, postscale=_factor(forward))
    return [
        total.slice_axis(0, first, first + shape[0]) if shape[0] else mx.nd.empty(shape, dtype=total.dtype)
        for total, first, shape in zip(totals, rows, shapes, strict=True)
    ]


@functools.lru_cache(maxsize=64)
def _position(position: int) -> NDArray:
    return mx.nd.full((1,), position, dtype=np.int64)


def _of_reducescatter(
    forward: Operation, shapes: Sequence[Sequence[int]], rows: Any, gradients: Arrays
) -> Arrays:
    """The gradients of all ranks' rows, scaled; those of ranks that have joined are zero.

    Rows of these are missing in what is gathered, so each rank sends its position along, and native.cc puts
    the others where they belong.
    """
    _require_linear(forward)
    members = current.world().process_sets()[forward.process_set]
    factor = forward.prescale * forward.postscale * _factor(forward)
    scaled = [g if factor == 1.0 or not g.size else g * factor for g in gradients]
    position = _position(members.index(current.world().placement.rank))
    whole = [*shapes, (len(members),)]
    *results, _ = _run(forward, OpKind.ALLGATHER, [*scaled, position], whole, numbers=[len(members)])
    return results


def _of_alltoall(
    forward: Operation,
    shapes: Sequence[Sequence[int]],
    rows: Sequence[tuple[int, int, bool]],
    gradients: Arrays,
) -> Arrays:
    """The gradients sent back; ``rows``: for each rank how many came, how many went, and whether it
    was there. Rows that stayed here have none, nor have those that went to a rank that had joined.
    """
    shape, (gradient,) = shapes[0], gradients
    sent = sum(went for _, went, there in rows if there)
    numbers = [came for came, _, _ in rows]
    (back,) = _run(forward, OpKind.ALLTOALL, (gradient,), [(sent, *shape[1:])], numbers=numbers)
    if sent == shape[0]:
        return (back,)

    def zeros(count: int) -> NDArray:
        return mx.nd.zeros((count, *shape[1:]), dtype=gradient.dtype, ctx=gradient.ctx)

    if back.size == 0:  # the result has to wait for it all the same: MXNet keeps gradients until then
        return (mx.nd.concat(back, zeros(shape[0]), dim=0),) if sent == 0 else (zeros(shape[0]),)
    parts, first = [], 0
    for _, went, there in rows:
        if there and went:
            parts.append(back.slice_axis(0, first, first + went))
            first += went
        elif went:
            parts.append(zeros(went))
    rest = shape[0] - sum(went for _, went, _ in rows)
    return (mx.nd.concat(*parts, *([zeros(rest)] if rest else []), dim=0),)


_GRADIENTS: dict[int, Callable[..., Arrays]] = {
    OpKind.ALLREDUCE: _of_allreduce,
    OpKind.ALLGATHER: _of_allgather,
    OpKind.BROADCAST: _of_broadcast,
    OpKind.ALLTOALL: _of_alltoall,
    OpKind.REDUCESCATTER: _of_reducescatter,
}


def _kept(gradients: Arrays) -> Arrays:
    """Copies, for want of a result: MXNet frees the gradients once the results are there."""
    copies = [gradient.copy() for gradient in gradients if gradient.size]
    for copy in copies:
        copy.wait_to_read()
    rest = iter(copies)
    return [next(rest) if gradient.size else gradient for gradient in gradients]


class _Node:
    """The state of a collective in autograd. MXNet holds a reference from ``record`` to ``_drop``."""

    def __init__(self, operation: Operation, shapes: Sequence[Sequence[int]], rows: Sequence[Any]) -> None:
        self._operation = operation
        self._shapes = shapes
        self._rows = rows
        address = id(self)
        self._contexts = (ctypes.c_void_p * 2)(address, address)
        self.callbacks = MXCallbackList(2, _CALLBACKS, self._contexts)

    def run(self, gradients: Arrays, targets: Arrays, requests: Sequence[int]) -> None:
        if not any(t.size for t, request in zip(targets, requests, strict=True) if request != _NULL):
            gradients = _kept(gradients)
        results = _GRADIENTS[self._operation.kind](self._operation, self._shapes, self._rows, gradients)
        for target, result, request in zip(targets, results, requests, strict=True):
            if request == _ADD:
                mx.nd.elemwise_add(target, result, out=target)
            elif request != _NULL:
                result.copyto(target)


# mx.autograd.Function would do, but it drops gradients that are to be added, and all after one that
# is not requested.
def _backward(outputs: int, inputs: int, pointers: Any, requests: Any, _training: int, node: int) -> int:
    arrays = [NDArray(NDArrayHandle(pointers[i])) for i in range(outputs + inputs)]
    try:
        with mx.util.np_shape(True):
            _node_at(node).run(arrays[:outputs], arrays[outputs:], requests[:inputs])
    except Exception as error:  # MXNet reports only that something failed, at the next read
        print(f"polyhvd: {error}", file=sys.stderr, flush=True)
        return 0
    return 1


def _drop(node: int) -> int:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(_node_at(node)))
    return 1


def _node_at(address: int) -> _Node:
    node: _Node = ctypes.cast(address, ctypes.py_object).value
    return node


_INTS = ctypes.POINTER(ctypes.c_int)
_POINTERS = ctypes.POINTER(ctypes.c_void_p)
_backward_function = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_int, ctypes.c_int, _POINTERS, _INTS, ctypes.c_int, ctypes.c_void_p
)(_backward)
_drop_function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(_drop)
_ANY_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_int)
_CALLBACKS = (_ANY_FUNCTION * 2)(
    ctypes.cast(_backward_function, _ANY_FUNCTION), ctypes.cast(_drop_function, _ANY_FUNCTION)
)


def _in_plain_layout(output: NDArray) -> NDArray:
    """The same values, whose gradient reaches us in memory that lives.

    A convolution leaves the gradient of what it read in a layout of oneDNN, which MXNet 1.9.1 reorders
    for us into memory that it frees at once. The gradient of a product is not in that layout.
    """
    return output * 1 if np.dtype(output.dtype).kind == "f" else output


def record(operation: Operation, inputs: Arrays, outputs: Arrays, rows: Sequence[Any]) -> Arrays:
    """Let autograd know how the outputs come from the inputs, if it records.

    Args:
        rows: of an allgather, for each input, the rows of it that come before this rank's; of an
            alltoall, for each rank, the rows received from it, those meant for it, and whether it was there.

    Returns:
        what to give to the program instead of the outputs.
    """
    if not mx.autograd.is_recording():
        return outputs
    node = _Node(operation, [t.shape for t in inputs], rows)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(node))
    check_call(
        _LIB.MXCustomFunctionRecord(
            len(inputs),
            c_handle_array(inputs),
            len(outputs),
            c_handle_array(outputs),
            ctypes.byref(node.callbacks),
        )
    )
    with mx.util.np_shape(True):
        return [_in_plain_layout(output) for output in outputs]
