"""Watching a model train on ranks of several frameworks, and telling where they part first."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from polyhvd.collectives.objects import allgather_object
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import InvalidArgumentError
from polyhvd.parity import log
from polyhvd.parity.comparing import array_of
from polyhvd.parity.models import framework_of, module_of, weights_of
from polyhvd.parity.traces import (
    Key,
    Trace,
    common_input,
    differences,
    in_order,
    limit_of,
    trace_of,
)
from polyhvd.training.mapping import Weight

__all__ = ["Divergence", "Watch", "watch"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Divergence:
    """Where ranks have parted.

    Args:
        step: counted from 0.
        kind: "input" (the batches differ), "activation", "gradient" (of a weight, on its rank) or "update"
            (what the optimizer has made of a weight).
        layer: which layer, counted from 0 among those that have weights.
        names: what each rank calls the layer, or the weight.
        rank: world rank that differs from the first one.
        relative: the norm of the difference over that of the first rank's tensor, estimated.
        limit: what is taken for rounding.
    """

    step: int
    kind: str
    layer: int
    names: tuple[str, ...]
    rank: int
    relative: float
    limit: float

    def __str__(self) -> str:
        where = {
            "input": "the inputs of the model differ",
            "activation": f"what layer {self.layer} makes differs",
            "gradient": "a gradient differs, and no activation does",
            "update": "an update of the optimizer differs, and no gradient does",
        }[self.kind]
        return (
            f"step {self.step}: {where}: {' / '.join(self.names)}, on rank {self.rank} by "
            f"{self.relative:.2g} of its norm, where {self.limit:.2g} may be rounding"
        )


class Watch:
    """What :func:`watch` returns. A context manager that ends the watch."""

    def __init__(
        self, model: Any, optimizer: Any, prefix: str, limit: float | None, process_set: ProcessSet
    ) -> None:
        #: All that was found, in order; the same on every rank.
        self.divergences: list[Divergence] = []
        self.steps = 0
        self._prefix = prefix
        self._limit = limit
        self._process_set = process_set
        self._weights = weights_of(model)
        self._traces: dict[Key, Trace] = {}
        self._before: list[Array] = []
        self._layers: list[Weight] = []  # of each the first weight, whose layer it is
        for weight in self._weights:
            if weight.layer is not None and all(weight.layer is not known.layer for known in self._layers):
                self._layers.append(weight)
        framework = importlib.import_module(module_of(model))
        if not hasattr(framework, "on_input"):
            raise InvalidArgumentError(
                f"parity.watch: expected a model of PyTorch, Gluon or Keras, found {framework_of(model)}"
            )
        self._ends: list[Callable[[], None]] = [
            framework.on_input(weight.layer, self._hears_input(number, weight))
            for number, weight in enumerate(self._layers)
            if weight.role not in ("input kernel", "state kernel")
        ]
        self._ends.append(framework.on_output(model, self._hears_output))
        if optimizer is not None:
            self._ends.append(framework.on_step(optimizer, self._before_step, self._after_step))

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the model and the optimizer; what was found stays."""
        while self._ends:
            self._ends.pop()()

    @property
    def first(self) -> Divergence | None:
        """The first divergence of all; None: there is none."""
        return self.divergences[0] if self.divergences else None

    def __str__(self) -> str:
        if self.first is None:
            return f"parity.watch: no rank has parted from the others in {self.steps} steps"
        return f"parity.watch: {self.first}"

    # Recording ------------------------------------------------------------------

    def _hears_input(self, number: int, weight: Weight) -> Callable[[Any], None]:
        def tell(tensor: Any) -> None:
            kind = "activation" if number else "input"
            made_by = self._layers[max(number - 1, 0)]
            array = common_input(array_of(tensor)[1], weight)
            self._note(trace_of(kind, number, max(number - 1, 0), made_by.name, array))

        return tell

    def _hears_output(self, tensor: Any) -> None:
        if isinstance(tensor, (list, tuple)):
            tensor = tensor[0]
        last, number = self._layers[-1], len(self._layers)
        array = array_of(tensor)[1]
        if last.channels_last and array.ndim > 3:
            array = np.moveaxis(array, -1, 1)
        self._note(trace_of("activation", number, number - 1, last.name, array))

    def _before_step(self, gradient_of: Callable[[Any], Any]) -> None:
        self._before = [weight.read() for weight in self._weights]
        for place, weight in enumerate(self._weights):
            gradient = gradient_of(weight.source) if weight.trainable else None
            if gradient is not None:
                self._note_weight("gradient", place, weight, array_of(gradient)[1])

    def _after_step(self) -> None:
        for place, weight in enumerate(self._weights):
            if weight.trainable:
                self._note_weight("update", place, weight, weight.read() - self._before[place])
        self.step()

    def _note_weight(self, kind: str, place: int, weight: Weight, array: Array) -> None:
        layer = next((i for i, known in enumerate(self._layers) if known.layer is weight.layer), 0)
        common = weight.layout.array_to_common(array)
        self._note(trace_of(kind, place, layer, weight.name, common))

    def _note(self, trace: Trace) -> None:
        self._traces[trace.key] = trace

    # Comparing ------------------------------------------------------------------

    def step(self) -> Divergence | None:
        """Compare what was recorded since the last step; an optimizer that is watched calls it itself.

        Returns:
            the first divergence of this step; None: there is none.

        Raises:
            HorovodInternalError: a rank was lost.
        """
        mine, self._traces = list(self._traces.values()), {}
        told = allgather_object(mine, name=f"{self._prefix}.step", process_set=self._process_set)
        ranks = tuple(self._process_set.ranks or range(len(told)))
        found = self._first_of(told, ranks)
        log.note(self._entry(found), ranks[0])
        self.steps += 1
        if found is not None:
            self.divergences.append(found)
        return found

    def _entry(self, found: Divergence | None) -> dict[str, Any]:
        """For the log."""
        return {
            "name": self._prefix,
            "agree": found is None,
            "first": {} if found is None else asdict(found),
            "text": "" if found is None else str(found),
            "relative": 0.0 if found is None else found.relative,
        }

    def _first_of(self, told: Sequence[list[Trace]], ranks: Sequence[int]) -> Divergence | None:
        sides = [{trace.key: trace for trace in side} for side in told]
        found = [dict(differences(side, sides[0])) for side in sides[1:]]
        for key in in_order(set.intersection(*(set(side) for side in sides))):
            reference = sides[0][key]
            limit = self._limit or limit_of(reference.dtype)
            for rank, relatives in zip(ranks[1:], found, strict=True):
                if (relative := relatives.get(key, 0.0)) > limit:
                    names = tuple(each[key].name for each in sides)
                    return Divergence(self.steps, key[0], reference.layer, names, rank, relative, limit)
        return None


def watch(
    model: Any,
    optimizer: Any = None,
    *,
    prefix: str = "parity.watch",
    limit: float | None = None,
    process_set: ProcessSet = global_process_set,
) -> Watch:
    """Watch a model train on all ranks, each in its framework, and tell where the first divergence is.

    Give every rank the same batches and the same weights to begin with (:func:`polyhvd.parity.load`). In each
    step of the optimizer, ranks compare what their layers were given and made, the gradients of their weights
    before these are averaged, and what the optimizer has made of them; by sketches, so that little is sent.

    Models run as they are written: Gluon's not hybridized, Keras' compiled with ``run_eagerly=True``.

    Args:
        model: of PyTorch, Gluon or Keras, built.
        optimizer: of the model: of PyTorch, a Trainer of Gluon, or the one that a model of Keras was compiled
            with; None: the program calls ``step()`` of what is returned, on every rank.
        prefix: begins the names on the wire; of several watches in a job each has its own.
        limit: differences up to this fraction of a tensor's norm are rounding; None: by dtype.
        process_set: the ranks that take part.

    Returns:
        A :class:`Watch`: ``first`` is the first divergence, and as text it says where that is.

    Raises:
        InvalidArgumentError: no such model, or weights are not made yet.

    Example::

        with parity.watch(model, optimizer) as watched:
            train(model, optimizer, batches)
        assert watched.first is None, watched
    """
    return Watch(model, optimizer, prefix, limit, process_set)
