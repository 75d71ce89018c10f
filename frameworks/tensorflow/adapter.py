"""Eager tensors, as the collectives see them. Graphs use separate ops; see ops.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from polyhvd.tensorflow import dtypes as known_dtypes

from polyhvd.collectives.adapter import Capability, Handle, Operation, OpKind

__all__ = ["TensorflowAdapter", "memory_of"]


def memory_of(tensor: Any) -> np.ndarray[Any, Any]:
    """The memory of a tensor or variable, to be looked at, without a copy when it lies on the host."""
    dense = tensor if isinstance(tensor, tf.Tensor) else tf.convert_to_tensor(tensor)
    if not hasattr(dense, "_numpy"):
        raise TypeError(
            f"{dense.name!r} is a tensor of a graph; asynchronous calls work on eager tensors, and in a "
            "tf.function every collective is asynchronous already: call the plain form"
        )
    array = dense._numpy()
    if not isinstance(array, np.ndarray):  # a scalar comes as a NumPy scalar on some versions
        array = np.asarray(array)
    return np.ascontiguousarray(array) if array.ndim else array


def _tensor(buffer: Any, dtype: tf.DType) -> tf.Tensor:
    """The core's buffer as a tensor that keeps it alive."""
    try:
        return tf.experimental.dlpack.from_dlpack(buffer.__dlpack__())
    except (tf.errors.OpError, RuntimeError):  # a type that DLPack did not know in older versions
        array = np.frombuffer(buffer, dtype=dtype.as_numpy_dtype).reshape(buffer.shape)
        return tf.constant(array, dtype)


class TensorflowAdapter:
    """See :class:`polyhvd.collectives.adapter.FrameworkAdapter`."""

    name = "tensorflow"
    capabilities = frozenset(
        {
            Capability.ASYNC,
            Capability.BFLOAT16,
            Capability.INT16,
            Capability.BOOL,
            Capability.UNSIGNED,
            Capability.EMPTY,
            Capability.GRAPH,
            Capability.AUTOGRAD,
        }
    )

    def submit(
        self, operation: Operation, tensors: Sequence[tf.Tensor], out: Sequence[tf.Variable] | None
    ) -> Handle:
        """Hand eager tensors to the core where they lie; results go to new tensors, or to variables."""
        arrays = [memory_of(tensor) for tensor in tensors]
        dtypes = [tf.as_dtype(array.dtype) for array in arrays]
        try:
            handle = operation.submit(arrays, None)
        except TypeError:
            known_dtypes.check(OpKind(operation.kind), tensors)
            raise
        if operation.kind == OpKind.ALLTOALL:
            dtypes.append(tf.int32)

        def finish(done: Any) -> list[Any]:
            results = [_tensor(b, d) for b, d in zip(done.buffers(), dtypes, strict=True)]
            if out is None:
                return results
            for target, value in zip(out, results, strict=True):
                self.assign(target, value)
            return list(out)

        handle.finish = finish
        return handle

    def is_plain(self, tensor: tf.Tensor) -> bool:
        """None: the core does not read them itself."""
        return False

    def dtype(self, tensor: tf.Tensor) -> str:
        """Name of the tensor's element type."""
        return str(tensor.dtype.name)

    def cast(self, tensor: tf.Tensor, dtype: str) -> tf.Tensor:
        """``tf.cast``, eager or in a graph."""
        return tf.cast(tensor, tf.as_dtype(dtype))

    def assign(self, target: tf.Variable, value: tf.Tensor) -> None:
        """``target.assign(value)``."""
        target.assign(tf.cast(value, target.dtype))

    def named_parameters(self, owner: object) -> Iterable[tuple[str, Any]]:
        """Items of a mapping, or pairs, or variables named by position."""
        if isinstance(owner, Mapping):
            return sorted(owner.items())
        variables: Any = getattr(owner, "variables", owner)
        items = list(variables)
        if items and not isinstance(items[0], tuple):
            return [(str(i), variable) for i, variable in enumerate(items)]
        return items
