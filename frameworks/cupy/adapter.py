"""CuPy arrays, as the collectives see them: by address and stream, and never on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import cupy  # type: ignore[import-untyped, import-not-found, unused-ignore]
import numpy as np

from polyhvd import _core
from polyhvd.collectives.adapter import Capability, Handle, Operation, OpKind
from polyhvd.training.arrays import named_arrays

__all__ = ["Array", "CupyAdapter"]

#: ``cupy.ndarray``; CuPy has no types.
Array = Any
_KEEPS_SHAPE = (OpKind.ALLREDUCE, OpKind.BROADCAST)


def _stream() -> int:
    """Address of the stream that this thread gives its work to."""
    return int(cupy.cuda.get_current_stream().ptr)


def _reference(array: Array, stream: int) -> _core.TensorRef:
    if not array.flags.c_contiguous:
        raise BufferError("the array is not dense in row-major order")
    return _core.TensorRef(
        array.data.ptr, array.shape, array.dtype.name, array, gpu=array.data.device_id, stream=stream
    )


def _array(buffer: _core.Buffer) -> Array:
    """The core's buffer as an array that keeps it alive; a table of rows, on the CPU, as NumPy's."""
    dtype = np.dtype(buffer.dtype)
    if buffer.gpu is None:
        return np.frombuffer(memoryview(buffer), dtype=dtype).reshape(buffer.shape)
    nbytes = int(np.prod(buffer.shape)) * dtype.itemsize
    memory = cupy.cuda.UnownedMemory(buffer.address, nbytes, buffer, buffer.gpu)
    return cupy.ndarray(buffer.shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


class CupyAdapter:
    """See :class:`polyhvd.collectives.adapter.FrameworkAdapter`.

    An operation begins after what the current stream was given before the call, and the stream that is
    current at ``synchronize()`` goes on after it; no call waits for the GPU.
    """

    name = "cupy"
    capabilities = frozenset(
        {
            Capability.IN_PLACE,
            Capability.ASYNC,
            Capability.INT16,
            Capability.BOOL,
            Capability.UNSIGNED,
            Capability.NON_CONTIGUOUS,
            Capability.EMPTY,
        }
    )

    def submit(self, operation: Operation, tensors: Sequence[Array], out: Sequence[Array] | None) -> Handle:
        """Hand arrays to the core where they lie; strided ones through a contiguous copy."""
        try:
            return self._submit(operation, tensors, out)
        except BufferError:
            return self._submit_copies(operation, tensors, out)

    def _submit(self, operation: Operation, tensors: Sequence[Array], out: Sequence[Array] | None) -> Handle:
        keeps_shape = operation.kind in _KEEPS_SHAPE
        if out is None and keeps_shape:
            out = [cupy.empty_like(tensor, order="C") for tensor in tensors]
        stream = _stream()
        inputs = [_reference(tensor, stream) for tensor in tensors]
        outputs = inputs if out is tensors else out and [_reference(tensor, stream) for tensor in out]
        handle = operation.submit(inputs, outputs)
        handle.finish = _held((lambda _: out) if keeps_shape else _arrays)
        return handle

    def _submit_copies(
        self, operation: Operation, tensors: Sequence[Array], out: Sequence[Array] | None
    ) -> Handle:
        dense = [cupy.array(tensor, order="C") for tensor in tensors]
        if out is None:
            return self._submit(operation, dense, None)
        handle = self._submit(operation, dense, dense)

        def copy_back(_: Any) -> Sequence[Array]:
            for target, value in zip(out, dense, strict=True):
                target[...] = value
            return out

        handle.finish = _held(copy_back)
        return handle

    def is_plain(self, tensor: Array) -> bool:
        """None: the core does not read them itself."""
        return False

    def dtype(self, tensor: Array) -> str:
        """Name of the array's element type."""
        return str(tensor.dtype.name)

    def cast(self, tensor: Array, dtype: str) -> Array:
        """``tensor.astype(dtype)``, without a copy when it has that type."""
        return tensor.astype(dtype, copy=False)

    def assign(self, target: Array, value: Array) -> None:
        """``target[...] = value``."""
        target[...] = value

    def named_parameters(self, owner: object) -> Iterable[tuple[str, Array]]:
        """Items of a mapping, or pairs, or a list of arrays named by position."""
        return named_arrays(owner)


def _arrays(handle: Any) -> list[Array]:
    return [_array(buffer) for buffer in handle.buffers()]


def _held(finish: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """``finish`` once the stream that is current then goes on after the operation."""

    def wait_and_finish(handle: Any) -> Any:
        handle.wait(_stream())
        return finish(handle)

    return wait_and_finish
