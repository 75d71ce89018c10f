"""NumPy arrays, as the collectives see them. The oracle of the tests uses it, too."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from polyhvd.collectives.adapter import Capability, Handle, Operation, OpKind
from polyhvd.errors import InvalidArgumentError
from polyhvd.training.arrays import named_arrays

__all__ = ["Array", "NumpyAdapter"]

Array = np.ndarray[Any, Any]


def _np_dtype(name: str) -> np.dtype[Any]:
    if name == "bfloat16":
        import ml_dtypes  # type: ignore[import-untyped, import-not-found, unused-ignore]

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _array(buffer: Any) -> Array:
    """The core's buffer as an array that keeps it alive."""
    array: Array = np.frombuffer(buffer, dtype=_np_dtype(buffer.dtype)).reshape(buffer.shape)
    return array


class NumpyAdapter:
    """See :class:`polyhvd.collectives.adapter.FrameworkAdapter`."""

    name = "numpy"
    capabilities = frozenset(
        {
            Capability.DIRECT,
            Capability.IN_PLACE,
            Capability.ASYNC,
            Capability.BFLOAT16,
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
        keeps_shape = operation.kind in (OpKind.ALLREDUCE, OpKind.BROADCAST)
        if out is None and keeps_shape:
            out = [np.empty_like(tensor) for tensor in tensors]
        handle = operation.submit(tensors, out)
        if keeps_shape:
            handle.result = out
        else:
            handle.finish = lambda h: [_array(buffer) for buffer in h.buffers()]
        return handle

    def _submit_copies(
        self, operation: Operation, tensors: Sequence[Array], out: Sequence[Array] | None
    ) -> Handle:
        dense = [np.array(tensor, order="C") for tensor in tensors]
        if out is None:
            return self._submit(operation, dense, None)
        for target in out:
            if not target.flags.writeable:
                raise InvalidArgumentError(
                    f"{operation.label!r}: the array is read-only; pass a writable one"
                )
        handle = self._submit(operation, dense, dense)

        def copy_back(_: Any) -> Sequence[Array]:
            for target, value in zip(out, dense, strict=True):
                target[...] = value
            return out

        handle.finish = copy_back
        return handle

    def is_plain(self, tensor: Array) -> bool:
        """All are."""
        return True

    def dtype(self, tensor: Array) -> str:
        """Name of the array's element type."""
        return str(tensor.dtype.name)

    def cast(self, tensor: Array, dtype: str) -> Array:
        """``tensor.astype(dtype)``, without a copy when it has that type."""
        return tensor.astype(_np_dtype(dtype), copy=False)

    def assign(self, target: Array, value: Array) -> None:
        """``target[...] = value``."""
        target[...] = value

    def named_parameters(self, owner: object) -> Iterable[tuple[str, Array]]:
        """Items of a mapping, or pairs, or a list of arrays named by position."""
        return named_arrays(owner)
