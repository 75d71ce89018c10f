"""The collectives on DeviceArray, as a framework's module of polyhvd offers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from device_arrays import DeviceArray, current_stream

from polyhvd import ProcessSet, barrier, global_process_set, join
from polyhvd.collectives.adapter import Capability, Handle, Operation, OpKind
from polyhvd.collectives.verbs import Collectives, resolve_op
from polyhvd.exports import *  # noqa: F403 - as an adapter does

__all__ = ["DeviceAdapter", "ProcessSet", "barrier", "global_process_set", "join"]


class DeviceAdapter:
    """What the tests need of polyhvd.collectives.adapter.FrameworkAdapter."""

    name = "device"
    capabilities = frozenset(
        {Capability.IN_PLACE, Capability.ASYNC, Capability.BFLOAT16, Capability.INT16, Capability.UNSIGNED}
        | {Capability.BOOL, Capability.EMPTY}
    )

    def submit(
        self, operation: Operation, tensors: Sequence[DeviceArray], out: Sequence[DeviceArray] | None
    ) -> Handle:
        keeps_shape = operation.kind in (OpKind.ALLREDUCE, OpKind.BROADCAST)
        if out is None and keeps_shape:
            out = [DeviceArray.empty(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        handle = operation.submit(
            [tensor.ref() for tensor in tensors], None if out is None else [tensor.ref() for tensor in out]
        )
        if keeps_shape:
            handle.result = out
        else:
            dtypes = [tensor.dtype for tensor in tensors]
            handle.finish = lambda h: _outputs(h.buffers(), dtypes)
        return handle

    def dtype(self, tensor: DeviceArray) -> str:
        return str(tensor.dtype.name)

    def cast(self, tensor: DeviceArray, dtype: str) -> DeviceArray:
        assert tensor.dtype.name == dtype
        return tensor


def _outputs(buffers: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Arrays; and of an alltoall the rows received, which are the CPU's."""
    arrays: list[Any] = [DeviceArray.from_buffer(b, d) for b, d in zip(buffers, dtypes, strict=False)]
    return arrays + [np.frombuffer(buffer, np.int32) for buffer in buffers[len(arrays) :]]


_collectives: Collectives[Any] = Collectives(DeviceAdapter())  # type: ignore[type-var]

synchronize = _collectives.synchronize
allgather = _collectives.allgather
allgather_async = _collectives.allgather_async
grouped_allgather = _collectives.grouped_allgather
grouped_allgather_async = _collectives.grouped_allgather_async
alltoall = _collectives.alltoall
alltoall_async = _collectives.alltoall_async
broadcast = _collectives.broadcast
broadcast_async = _collectives.broadcast_async


def poll(handle: Handle) -> bool:
    """Whether it is done once the current stream, which synchronize() made wait for it, has got there."""
    current_stream().synchronize()
    return _collectives.poll(handle)


def allreduce(tensor: DeviceArray, op: int | None = None, **options: Any) -> DeviceArray:
    result: DeviceArray = _collectives.allreduce(tensor, op=resolve_op(op), **options)
    return result


def allreduce_(tensor: DeviceArray, **options: Any) -> DeviceArray:
    return allreduce(tensor, in_place=True, **options)


def allreduce_async(tensor: DeviceArray, op: int | None = None, **options: Any) -> Handle:
    return _collectives.allreduce_async(tensor, op=resolve_op(op), **options)


def allreduce_async_(tensor: DeviceArray, **options: Any) -> Handle:
    return allreduce_async(tensor, in_place=True, **options)


def grouped_allreduce(tensors: Sequence[DeviceArray], op: int | None = None, **options: Any) -> Any:
    return _collectives.grouped_allreduce(tensors, op=resolve_op(op), **options)


def grouped_allreduce_async(tensors: Sequence[DeviceArray], op: int | None = None, **options: Any) -> Handle:
    return _collectives.grouped_allreduce_async(tensors, op=resolve_op(op), **options)


def reducescatter(tensor: DeviceArray, op: int | None = None, **options: Any) -> DeviceArray:
    return _collectives.reducescatter(tensor, op=resolve_op(op), **options)  # type: ignore[no-any-return]


def reducescatter_async(tensor: DeviceArray, op: int | None = None, **options: Any) -> Handle:
    return _collectives.reducescatter_async(tensor, op=resolve_op(op), **options)


def grouped_reducescatter(tensors: Sequence[DeviceArray], op: int | None = None, **options: Any) -> Any:
    return _collectives.grouped_reducescatter(tensors, op=resolve_op(op), **options)


def grouped_reducescatter_async(
    tensors: Sequence[DeviceArray], op: int | None = None, **options: Any
) -> Handle:
    return _collectives.grouped_reducescatter_async(tensors, op=resolve_op(op), **options)


def broadcast_(tensor: DeviceArray, root_rank: int, **options: Any) -> DeviceArray:
    result: DeviceArray = _collectives.broadcast(tensor, root_rank, in_place=True, **options)
    return result


def broadcast_async_(tensor: DeviceArray, root_rank: int, **options: Any) -> Handle:
    return _collectives.broadcast_async(tensor, root_rank, in_place=True, **options)
