"""The weights of one model in jobs whose ranks have different frameworks: common names and layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polyhvd import _core
from polyhvd.collectives.adapter import OpKind
from polyhvd.collectives.objects import allgather_object
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.errors import InvalidArgumentError, RankMismatchError, UnsupportedError
from polyhvd.runtime import current
from polyhvd.training.layouts import Layout

__all__ = ["Mapped", "Weight", "WeightMapping", "checked_mapping"]

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Weight:
    """A weight of a model, as its framework has it.

    Args:
        name: in the model, for people.
        role: what it is in its layer, in words that all frameworks share, such as "kernel", "bias", "scale",
            "offset", "mean" and "variance"; empty: not known.
        source: the framework's own object, by which optimizers know it.
        layout: how it lies.
        dtype: NumPy's name of it.
        trainable: whether it has gradients.
        read: a copy of it, as an array.
        write: overwrites it with an array of its shape.
        is_whole: whether the source is this weight and no other. Else, and where blocks change places, it can
            be loaded, but its gradients do not meet those of other frameworks.
        layer: that has it; None: not known.
        channels_last: whether the layer takes images, or rows of them, whose channels come last.
        rows: shapes of images that are behind each other in the rows that the layer takes, channels last;
            empty: none.
        unfollowed: the layer that moves axes so that the order of this weight's inputs is not known; empty:
            it is known.
    """

    name: str
    role: str
    source: Any
    layout: Layout
    dtype: str
    trainable: bool
    read: Callable[[], Array]
    write: Callable[[Array], None]
    is_whole: bool = True
    layer: Any = None
    channels_last: bool = False
    rows: tuple[tuple[int, ...], ...] = ()
    unfollowed: str = ""

    @property
    def form(self) -> tuple[str, tuple[int, ...], str, bool]:
        """The properties that ranks agree on: role, common shape, dtype, and whether it is trainable."""
        return self.role, self.layout.common_shape, self.dtype, self.trainable


@dataclass(frozen=True)
class Mapped:
    """The number of a gradient, the same on every rank, its layout on this one, and what reads its weight."""

    number: int
    layout: Layout
    read: Callable[[], Array]


class WeightMapping:
    """The result of :func:`polyhvd.parity.mapping`. Optimizers take it as ``mapping``.

    Args:
        framework: whose weights these are.
        weights: in the order of the model's layers.
        prefix: begins the names on the wire.
        process_set: the ranks that have the model.

    Raises:
        UnsupportedError: a weight cannot meet those of other frameworks.
        RankMismatchError: the ranks' models do not match; on every rank.
    """

    def __init__(
        self, framework: str, weights: Sequence[Weight], prefix: str, process_set: ProcessSet
    ) -> None:
        self.framework = framework
        self.weights = list(weights)
        self.prefix = prefix
        self.process_set = process_set
        for weight in self.weights:
            if not weight.is_whole or weight.layout.blocks is not None:
                raise UnsupportedError(
                    f"parity.mapping {prefix!r}: {weight.name!r} is of a recurrent cell, whose gates or "
                    f"biases {framework} lays out differently: its gradients cannot be averaged with "
                    "those of other frameworks; train it on ranks of one framework"
                )
        self._agree()

    def _agree(self) -> None:
        mine = (self.framework, [(weight.name, *weight.form) for weight in self.weights])
        every = allgather_object(mine, name=f"{self.prefix}.mapping", process_set=self.process_set)
        #: Whether the steps of all ranks are those of optimizers: NumPy has none.
        self.has_optimizers = all(framework != "numpy" for framework, _ in every)
        ranks = self.process_set.ranks or range(len(every))
        sides = [(rank, *model) for rank, model in zip(ranks, every, strict=True)]
        difference = _first_difference(sides)
        if difference is not None:
            raise RankMismatchError(
                f"parity.mapping {self.prefix!r}: the ranks' models do not match: {difference}; make them "
                "with the same layers in the same order, all of them built, and with the same weights frozen"
            )

    def by_source(self, identity: Callable[[Any], Any]) -> dict[Any, Mapped]:
        """The known facts about gradients of the trained weights, which are numbered in order.

        Args:
            identity: of a source; the same for an object and its wrapper.
        """
        trained = [weight for weight in self.weights if weight.trainable]
        return {
            identity(weight.source): Mapped(number, weight.layout, weight.read)
            for number, weight in enumerate(trained)
        }

    def broadcast(self, root_rank: int = 0) -> None:
        """Overwrite the weights of all ranks with those of one, whatever its framework is.

        Statistics of batch normalization are weights, too; states of optimizers are not.

        Args:
            root_rank: world rank of the one whose weights are kept.

        Raises:
            InvalidArgumentError: the root is not in the process set.
            HorovodInternalError: a rank was lost, or the engine was shut down.

        Example::

            mapping = polyhvd.parity.mapping(net)
            mapping.broadcast(root_rank=0)
        """
        engine = current.world().engine
        arrays = [
            np.array(weight.layout.array_to_common(weight.read()), order="C", ndmin=1)
            for weight in self.weights
        ]
        if not arrays:
            return
        tensors = [_tensor(array) for array in arrays]
        engine.submit(
            OpKind.BROADCAST,
            f"{self.prefix}.weights",
            tensors,
            tensors,
            root=root_rank,
            process_set=process_set_id(self.process_set),
            blocking=True,
        ).wait()
        for weight, array in zip(self.weights, arrays, strict=True):
            common = array.reshape(weight.layout.common_shape)
            weight.write(np.ascontiguousarray(weight.layout.array_from_common(common)))

    def arrays(self) -> dict[str, Array]:
        """Copies of all weights in common form, by name, in order: those of two ranks can be compared."""
        return {
            weight.name: np.array(weight.layout.array_to_common(weight.read()), order="C")
            for weight in self.weights
        }


def _tensor(array: Array) -> Any:
    """Return the array as a tensor of the core: NumPy's own protocols do not support bfloat16."""
    return _core.TensorRef(array.ctypes.data, array.shape, str(array.dtype), array)


def _first_difference(sides: Sequence[tuple[int, str, list[tuple[Any, ...]]]]) -> str | None:
    """Return where the ranks' models begin to differ, in words; None: nowhere."""
    longest = max(len(weights) for _, _, weights in sides)
    for position in range(longest):
        each = [weights[position] if position < len(weights) else None for _, _, weights in sides]
        if _match(each):
            continue
        sides_text = ", ".join(
            f"rank {rank} ({framework}) has {_described(weight)}"
            for (rank, framework, _), weight in zip(sides, each, strict=True)
        )
        return f"at weight {position}, {sides_text}"
    return None


def _match(each: Iterable[tuple[Any, ...] | None]) -> bool:
    forms = [None if weight is None else weight[1:] for weight in each]
    if None in forms:
        return False
    roles = {form[0] for form in forms if form is not None} - {""}
    return len(roles) <= 1 and len({form[1:] for form in forms if form is not None}) == 1


def _described(weight: tuple[Any, ...] | None) -> str:
    if weight is None:
        return "no more"
    name, role, shape, dtype, trainable = weight
    state = "" if trainable else ", not trained"
    return f"{name!r} ({role or 'weight'} {dtype} {list(shape)} in common form{state})"


def checked_mapping(value: Any, others: Mapping[str, Any]) -> WeightMapping | None:
    """``mapping=`` of an optimizer.

    Args:
        value: a mapping, or None.
        others: options that exclude it if they are set, by name.

    Raises:
        InvalidArgumentError: it is something else, or an option excludes it.
    """
    if value is None:
        return None
    if not isinstance(value, WeightMapping):
        raise InvalidArgumentError(
            f"mapping: expected what polyhvd.parity.mapping(model) returns, found {type(value).__name__}"
        )
    for name, given in others.items():
        if given:
            raise InvalidArgumentError(
                f"{name} and mapping exclude each other: with a mapping each gradient is a separate "
                f"operation in every framework; leave {name} out"
            )
    return value
