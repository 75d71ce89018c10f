"""Gradients of one step, over the ranks, as symbolic or eager tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import ops, sparse
from polyhvd.tensorflow.errors import as_tensorflow, invalid

from polyhvd.adapter import ReduceOp
from polyhvd.api import resolve_op
from polyhvd.compression import Compressor
from polyhvd.process_sets import ProcessSet, global_process_set
from polyhvd.reducer import scale_factors

__all__ = ["Reduction", "accept_device", "as_dense", "only_default", "reduction_of"]


def only_default(where: str, **arguments: tuple[Any, Any]) -> None:
    """Raise for an argument that is not at its default; given as ``name=(value, default)``."""
    for name, (value, default) in arguments.items():
        if value is not default and value != default:
            raise invalid(f"{where}({name}={value!r}) is not supported yet; leave it at {default!r}")


def accept_device(where: str, **devices: str) -> None:
    """Take Horovod's ``device_dense`` and ``device_sparse``, where the host is meant."""
    for name, device in devices.items():
        if device and "cpu" not in device.lower():
            raise invalid(f"{where}({name}={device!r}): collectives run on the host; leave it at ''")


def reduction_of(op: int | None, average: bool | None = None) -> int:
    """See :func:`polyhvd.api.resolve_op`."""
    with as_tensorflow():
        return resolve_op(op, average)


def as_dense(tensor: Any, what: str, *, sparse_as_dense: bool = False) -> tf.Tensor:
    """A tensor; of tf.IndexedSlices only if the caller agrees to the size."""
    if isinstance(tensor, tf.Tensor):
        return tensor
    if isinstance(tensor, tf.IndexedSlices) and not sparse_as_dense:
        raise invalid(
            f"{what} is a tf.IndexedSlices, which allreduce() and grouped_allreduce() alone take; convert it "
            "with tf.convert_to_tensor()"
        )
    return tf.convert_to_tensor(tensor)


def _reference(source: Any) -> Any:
    """What a variable and its wrappers have in common: Keras 3 wraps TensorFlow's variables."""
    variable = getattr(source, "value", None)
    if isinstance(variable, (tf.Variable, tf.Tensor)):
        source = variable
    return source.ref() if hasattr(source, "ref") else id(source)


def _checked_groups(num_groups: int, groups: Any) -> int | list[set[Any]] | None:
    """Horovod's ``groups``, or its older ``num_groups``: a number, identities by group, or None for one."""
    name = "num_groups" if groups is None else "groups"
    wanted = num_groups if groups is None else groups
    if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
        return wanted or None
    lists = isinstance(wanted, (list, tuple)) and all(isinstance(group, (list, tuple)) for group in wanted)
    if name == "num_groups" or not lists:
        expected = "a non-negative integer" + (
            " or a list of lists of tf.Variable" if groups is not None else ""
        )
        raise invalid(f"{name}={wanted!r}: expected {expected}")
    members = [[_reference(variable) for variable in group] for group in wanted]
    everybody = [reference for group in members for reference in group]
    if len(set(everybody)) != len(everybody):
        raise invalid("groups: a variable is in two groups, or twice in one; name each once")
    return [set(group) for group in members]


def _parts(positions: Sequence[int], count: int) -> Iterator[list[int]]:
    """Consecutive parts of about equal length, none of them empty."""
    length, longer = divmod(len(positions), count)
    begin = 0
    for part in range(count):
        end = begin + length + (part < longer)
        if end > begin:
            yield list(positions[begin:end])
        begin = end


class Reduction:
    """How an optimizer or a tape reduces its gradients.

    All dense gradients of a step are one operation, and all sparse ones another, unless there are groups.

    Args:
        prefix: begins the names on the wire.
        local: identities (``ref()``) of variables whose gradients stay on their rank.
        op, compression, sparse_as_dense, gradient_predivide_factor, num_groups, groups, process_set,
            scale_local_gradients: as in :func:`polyhvd.tensorflow.DistributedOptimizer`.
    """

    def __init__(
        self,
        *,
        prefix: str,
        compression: Compressor,
        op: int = ReduceOp.Average,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Any = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
    ) -> None:
        op = reduction_of(op)
        if op not in (ReduceOp.Average, ReduceOp.Sum, ReduceOp.Adasum):
            raise invalid(f"op={ReduceOp(op).name}: gradients are reduced with Average, Sum or Adasum")
        self.prefix = prefix
        self.op = op
        self.compression = compression
        self.sparse_as_dense = sparse_as_dense
        with as_tensorflow():
            self.prescale, self.postscale = scale_factors(op, gradient_predivide_factor)
        self.groups = _checked_groups(num_groups, groups)
        self.process_set = process_set
        self.scale_local_gradients = scale_local_gradients
        self.local: set[Any] = set()

    def __call__(self, gradients: Sequence[Any], sources: Sequence[Any] | None = None) -> list[Any]:
        """The reduced gradients, None where there was none; ``sources`` are the variables they belong to."""
        results = list(gradients)
        positions = [i for i, g in enumerate(results) if g is not None]
        if self.local and sources is not None:
            for i in [i for i in positions if _reference(sources[i]) in self.local]:
                positions.remove(i)
                if self.scale_local_gradients:
                    results[i] = sparse.divided(results[i], self.process_set.size())
        slices = []
        if not self.sparse_as_dense:
            slices = [i for i in positions if isinstance(results[i], tf.IndexedSlices)]
        dense = [i for i in positions if i not in slices]
        for name, members in self._grouped(dense, sources):
            tensors = [tf.convert_to_tensor(results[i]) for i in members]
            for i, value in zip(members, self._reduce(tensors, name), strict=True):
                results[i] = value
        if slices:
            reduced = self._reduce_slices([results[i] for i in slices])
            for i, value in zip(slices, reduced, strict=True):
                results[i] = value
        return results

    def _grouped(
        self, positions: Sequence[int], sources: Sequence[Any] | None
    ) -> Iterator[tuple[str, Sequence[int]]]:
        """Names of operations, and the positions of their gradients."""
        if self.groups is None:
            if positions:
                yield self.prefix, positions
            return
        if isinstance(self.groups, int):
            for number, part in enumerate(_parts(positions, self.groups)):
                yield f"{self.prefix}.group.{number}", part
            return
        if sources is None:
            raise invalid("groups=: the call does not tell the variables of the gradients; pass both")
        left = {i: _reference(sources[i]) for i in positions}
        for number, group in enumerate(self.groups):
            members = [i for i, reference in left.items() if reference in group]
            if members:
                yield f"{self.prefix}.group.{number}", members
            for i in members:
                del left[i]
        for i in left:
            yield f"{self.prefix}.{i}", [i]

    def _reduce(self, gradients: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        pairs = [self.compression.compress(gradient) for gradient in gradients]
        reduced = ops.allreduce(
            [tensor for tensor, _ in pairs],
            name=name,
            op=self.op,
            prescale_factor=self.prescale,
            postscale_factor=self.postscale,
            process_set=self.process_set,
        )
        return [
            self.compression.decompress(value, context)
            for value, (_, context) in zip(reduced, pairs, strict=True)
        ]

    def _reduce_slices(self, gradients: list[tf.IndexedSlices]) -> list[tf.IndexedSlices]:
        reduced = sparse.allreduce(
            gradients,
            name=f"{self.prefix}.sparse",
            op=self.op,
            compression=self.compression,
            prescale_factor=self.prescale,
            postscale_factor=self.postscale,
            process_set=self.process_set,
        )
        return [sparse.merged(slices) for slices in reduced]
