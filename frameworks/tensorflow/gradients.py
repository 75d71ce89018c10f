"""Gradients of one step, over the ranks, as symbolic or eager tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import ops

from polyhvd.adapter import ReduceOp
from polyhvd.api import resolve_op
from polyhvd.compression import Compressor
from polyhvd.errors import InvalidArgumentError
from polyhvd.process_sets import ProcessSet, global_process_set
from polyhvd.reducer import scale_factors

__all__ = ["Reduction", "accept_device", "as_dense", "grouped_by_dtype", "only_default"]


def only_default(where: str, **arguments: tuple[Any, Any]) -> None:
    """Raise for an argument that is not at its default; given as ``name=(value, default)``."""
    for name, (value, default) in arguments.items():
        if value is not default and value != default:
            raise NotImplementedError(
                f"{where}({name}={value!r}) is not supported yet; leave it at {default!r}"
            )


def accept_device(where: str, **devices: str) -> None:
    """Take Horovod's ``device_dense`` and ``device_sparse``, where the host is meant."""
    for name, device in devices.items():
        if device and "cpu" not in device.lower():
            raise NotImplementedError(
                f"{where}({name}={device!r}): collectives run on the host; leave it at ''"
            )


def as_dense(tensor: Any, what: str, *, sparse_as_dense: bool = False) -> tf.Tensor:
    """A tensor; of tf.IndexedSlices only if the caller agrees to the size."""
    if isinstance(tensor, tf.Tensor):
        return tensor
    if isinstance(tensor, tf.IndexedSlices) and not sparse_as_dense:
        raise NotImplementedError(
            f"{what} is a tf.IndexedSlices, as of an embedding; sparse tensors are not supported yet: pass "
            "sparse_as_dense=True, or convert it with tf.convert_to_tensor()"
        )
    return tf.convert_to_tensor(tensor)


def grouped_by_dtype(tensors: Sequence[Any]) -> dict[str, list[int]]:
    """Positions of the tensors of each element type."""
    groups: dict[str, list[int]] = {}
    for position, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype.name, []).append(position)
    return groups


class Reduction:
    """How an optimizer or a tape reduces its gradients; one operation per dtype and step.

    Args:
        prefix: begins the names on the wire.
        local: identities (``ref()``) of variables whose gradients stay on their rank.
        op, compression, sparse_as_dense, gradient_predivide_factor, process_set, scale_local_gradients:
            as in :func:`polyhvd.tensorflow.DistributedOptimizer`.
    """

    def __init__(
        self,
        *,
        prefix: str,
        compression: Compressor,
        op: int = ReduceOp.Average,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        op = resolve_op(op)
        if op not in (ReduceOp.Average, ReduceOp.Sum):
            raise InvalidArgumentError(f"op={op!r}: gradients are reduced with Average or Sum")
        self.prefix = prefix
        self.op = op
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        self.prescale, self.postscale = scale_factors(op, gradient_predivide_factor)
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.local: set[Any] = set()

    def __call__(self, gradients: Sequence[Any], sources: Sequence[Any] | None = None) -> list[Any]:
        """The reduced gradients, None where there was none; ``sources`` tell which ones are local."""
        results = list(gradients)
        positions = [i for i, g in enumerate(results) if g is not None]
        if self.local and sources is not None:
            for i in [i for i in positions if _reference(sources[i]) in self.local]:
                positions.remove(i)
                if self.scale_local_gradients:
                    results[i] = results[i] / self.process_set.size()
        dense = [
            as_dense(results[i], f"the gradient at position {i}", sparse_as_dense=self.sparse_as_dense)
            for i in positions
        ]
        for position, value in zip(positions, self._reduce(dense), strict=True):
            results[position] = value
        return results

    def _reduce(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        pairs = [self.compression.compress(gradient) for gradient in gradients]
        results: list[Any] = [None] * len(pairs)
        sent = [tensor for tensor, _ in pairs]
        for dtype, positions in grouped_by_dtype(sent).items():
            reduced = ops.allreduce(
                [sent[i] for i in positions],
                name=f"{self.prefix}.{dtype}",
                op=self.op,
                prescale_factor=self.prescale,
                postscale_factor=self.postscale,
                process_set=self.process_set,
            )
            for i, value in zip(positions, reduced, strict=True):
                results[i] = self.compression.decompress(value, pairs[i][1])
        return results


def _reference(source: Any) -> Any:
    """What a variable and its wrappers have in common: Keras 3 wraps TensorFlow's variables."""
    variable = getattr(source, "value", None)
    if isinstance(variable, (tf.Variable, tf.Tensor)):
        source = variable
    return source.ref() if hasattr(source, "ref") else id(source)
