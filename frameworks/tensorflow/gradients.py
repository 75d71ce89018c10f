"""Gradients of one step, over the ranks, as symbolic or eager tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from polyhvd.tensorflow import names, ops, sparse
from polyhvd.tensorflow.errors import as_tensorflow, invalid

from polyhvd.collectives.process_sets import global_process_set
from polyhvd.collectives.verbs import resolve_op
from polyhvd.training.gradient_groups import parameter_groups
from polyhvd.training.options import Options

__all__ = ["Reduction", "accept_device", "as_dense", "options_of", "reduction_of"]


def accept_device(where: str, **devices: str) -> None:
    """Take Horovod's ``device_dense`` and ``device_sparse``, where the host is meant."""
    for name, device in devices.items():
        if device and "cpu" not in device.lower():
            raise invalid(f"{where}({name}={device!r}): collectives run on the host; leave it at ''")


def reduction_of(op: int | None, average: bool | None = None) -> int:
    """See :func:`polyhvd.collectives.verbs.resolve_op`."""
    with as_tensorflow():
        return resolve_op(op, average)


def options_of(arguments: Mapping[str, Any]) -> Options:
    """See :meth:`polyhvd.training.options.Options.of`."""
    with as_tensorflow():
        return Options.of(arguments)


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


def _layers(local_layers: Any) -> list[Any]:
    """The layers, each of which has variables."""
    if local_layers is None:
        return []
    layers = list(local_layers) if isinstance(local_layers, (list, tuple, set)) else [local_layers]
    for layer in layers:
        if not hasattr(type(layer), "weights"):
            raise invalid(
                f"local_layers: expected layers of Keras, found {type(layer).__name__}; variables go to "
                "register_local_var() of the optimizer, or register_local_source() of the tape"
            )
    return layers


class _Groups:
    """:func:`parameter_groups` for variables that are heard of only when their gradients come.

    A variable and its wrappers are one. Groups may list variables that a step does not have.
    """

    def __init__(self, grouping: int | Sequence[Sequence[Any]]) -> None:
        # parameter_groups() tells parameters apart by identity: one object for all references to one.
        self._identities: dict[Any, Any] = {}
        self._grouping = grouping
        if not isinstance(grouping, int):
            self._grouping = [
                [self._identities.setdefault(ref, ref) for ref in map(_reference, group)]
                for group in grouping
            ]
            with as_tensorflow():
                parameter_groups([ref for group in self._grouping for ref in group], [], self._grouping)

    def of(self, positions: Sequence[int], sources: Sequence[Any] | None) -> dict[str, list[int]]:
        """What is reduced together, by what its name ends in; variables in none of the lists are alone."""
        if not self._grouping:
            return {"": list(positions)} if positions else {}
        if isinstance(self._grouping, int):
            return _numbered(parameter_groups([], positions, self._grouping))
        if sources is None:
            raise invalid("groups=: the call does not tell the variables of the gradients; pass both")
        parameters = [self._identities.get(ref, ref) for ref in map(_reference, sources)]
        present = {id(parameter) for parameter in parameters}
        groups = [[ref for ref in group if id(ref) in present] for group in self._grouping]
        members = parameter_groups(parameters, positions, groups)
        grouped = {i for group in members for i in group}
        return _numbered(members) | {f".{i}": [i] for i in positions if i not in grouped}


def _numbered(groups: Sequence[list[int]]) -> dict[str, list[int]]:
    return {f".group.{number}": group for number, group in enumerate(groups)}


class Reduction:
    """How an optimizer or a tape reduces its gradients.

    All dense gradients of a step are one operation, and all sparse ones another, unless there are groups.

    Args:
        prefix: begins the names on the wire.
        options: of the optimizer or tape.
        local_layers: a layer of Keras, or several, whose gradients stay on their rank.
    """

    def __init__(self, prefix: str, options: Options, local_layers: Any = None) -> None:
        self.prefix = prefix
        self.options = options
        self.process_set = options.process_set
        self.groups = _Groups(options.grouping)
        self.local: set[Any] = set()
        self.local_layers = _layers(local_layers)

    def are_local(self, sources: Sequence[Any]) -> list[bool]:
        """Which gradients stay on their rank; also of layers that were not built when they were listed."""
        local = self.local.union(_reference(v) for layer in self.local_layers for v in layer.weights)
        return [_reference(source) in local for source in sources]

    def takes_part(self) -> bool:
        """Whether this rank is in the process set; another one keeps its gradients as they are."""
        if self.process_set is global_process_set or self.process_set.process_set_id is None:
            return True  # of a set that is not registered, the collective says what to do
        return self.process_set.included()

    def name_of_step(self) -> str:
        """A prefix for what a branch of the graph that is being traced does, where names begin anew."""
        if tf.executing_eagerly():
            return self.prefix
        return names.in_graph(self.prefix, self.process_set.process_set_id or 0)

    def __call__(
        self, gradients: Sequence[Any], sources: Sequence[Any] | None = None, prefix: str | None = None
    ) -> list[Any]:
        """The reduced gradients, None where there was none; outside of the process set this rank's own.

        Args:
            gradients: tensors, slices or None.
            sources: the variables they belong to.
            prefix: for this call.
        """
        if not self.takes_part():
            return list(gradients)
        prefix = prefix or self.prefix
        results = list(gradients)
        positions = [i for i, g in enumerate(results) if g is not None]
        if sources is not None:
            stays = self.are_local(sources)
            for i in [i for i in positions if stays[i]]:
                positions.remove(i)
                if self.options.scale_local_gradients:
                    results[i] = sparse.divided(results[i], self.process_set.size())
        slices = []
        if not self.options.sparse_as_dense:
            slices = [i for i in positions if isinstance(results[i], tf.IndexedSlices)]
        dense = [i for i in positions if i not in slices]
        for suffix, members in self.groups.of(dense, sources).items():
            tensors = [tf.convert_to_tensor(results[i]) for i in members]
            for i, value in zip(members, self._reduce(tensors, prefix + suffix), strict=True):
                results[i] = value
        if slices:
            reduced = self._reduce_slices([results[i] for i in slices], f"{prefix}.sparse")
            for i, value in zip(slices, reduced, strict=True):
                results[i] = value
        return results

    def _reduce(self, gradients: list[tf.Tensor], name: str) -> list[tf.Tensor]:
        pairs = [self.options.compression.compress(gradient) for gradient in gradients]
        reduced = ops.allreduce(
            [tensor for tensor, _ in pairs],
            name=name,
            op=self.options.op,
            prescale_factor=self.options.prescale_factor,
            postscale_factor=self.options.postscale_factor,
            process_set=self.process_set,
        )
        return [
            self.options.compression.decompress(value, context)
            for value, (_, context) in zip(reduced, pairs, strict=True)
        ]

    def _reduce_slices(self, gradients: list[tf.IndexedSlices], name: str) -> list[tf.IndexedSlices]:
        reduced = sparse.allreduce(
            gradients,
            name=name,
            op=self.options.op,
            compression=self.options.compression,
            prescale_factor=self.options.prescale_factor,
            postscale_factor=self.options.postscale_factor,
            process_set=self.process_set,
        )
        return [sparse.merged(slices) for slices in reduced]
