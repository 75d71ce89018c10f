"""The collectives on DeviceArray, as a framework's module of polyhvd offers them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from device_arrays import DeviceArray, current_stream

from polyhvd import ProcessSet, barrier, global_process_set, join
from polyhvd.collectives.adapter import Capability, Handle, Operation, OpKind
from polyhvd.collectives.functions import Functions
from polyhvd.collectives.verbs import Collectives
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


_functions: Functions[Any] = Functions(Collectives(DeviceAdapter()))  # type: ignore[type-var]

synchronize = _functions.synchronize
allreduce = _functions.allreduce
allreduce_ = _functions.allreduce_
allreduce_async = _functions.allreduce_async
allreduce_async_ = _functions.allreduce_async_
grouped_allreduce = _functions.grouped_allreduce
grouped_allreduce_async = _functions.grouped_allreduce_async
allgather = _functions.allgather
allgather_async = _functions.allgather_async
grouped_allgather = _functions.grouped_allgather
grouped_allgather_async = _functions.grouped_allgather_async
broadcast = _functions.broadcast
broadcast_ = _functions.broadcast_
broadcast_async = _functions.broadcast_async
broadcast_async_ = _functions.broadcast_async_
alltoall = _functions.alltoall
alltoall_async = _functions.alltoall_async
reducescatter = _functions.reducescatter
reducescatter_async = _functions.reducescatter_async
grouped_reducescatter = _functions.grouped_reducescatter
grouped_reducescatter_async = _functions.grouped_reducescatter_async


def poll(handle: Handle) -> bool:
    """Whether it is done once the current stream, which synchronize() made wait for it, has got there."""
    current_stream().synchronize()
    return _functions.poll(handle)
