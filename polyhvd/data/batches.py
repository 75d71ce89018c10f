"""Common code of the frameworks' ``Batches``: which columns a batch has, and in which order."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from polyhvd.data.columns import require_unmasked
from polyhvd.data.loader import Batch, Iteration, Loader

__all__ = ["Batches"]


class Batches(ABC):
    """Iterates over a loader, with batches of the framework's tensors.

    The position is that of the loader, and a batch counts as with the loader: when the next one is asked
    for. ``hvd.elastic.train`` takes it as data.

    Args:
        loader: an :class:`polyhvd.data.ArrayLoader` or :class:`polyhvd.data.ParquetLoader`.
        x: the column of the inputs; several inputs are a tuple, a list or a dict of columns. A column is a
            name, or a number where the loader has a sequence of arrays. None: batches have all columns, in
            the form that the loader gives them. Else a batch is a sequence of x, y and sample_weight, as far
            as they are given.
        y: the column, or columns, of the targets.
        sample_weight: the column of the weights of rows.

    Raises:
        ValueError: an argument is of no use; or, in the loop, a batch has no such column, or masked entries.
    """

    def __init__(self, loader: Loader, x: Any = None, y: Any = None, sample_weight: Any = None) -> None:
        if not isinstance(loader, Loader):
            raise ValueError(
                f"Batches(loader={type(loader).__qualname__}): expected an ArrayLoader or ParquetLoader of "
                "polyhvd.data"
            )
        if (x is None and y is not None) or (y is None and sample_weight is not None):
            missing, given = ("x", "y") if x is None else ("y", "sample_weight")
            raise ValueError(f"Batches({given}=...): {missing} is missing; name its column, too")
        self.loader = loader
        self._columns = {"x": x, "y": y, "sample_weight": sample_weight}

    def __len__(self) -> int:
        """The number of steps that are left in this epoch, if the world stays as it is."""
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; if it is the current one, stay where it is.

        Args:
            epoch: its number, from 0.

        Raises:
            ValueError: it is not an integer of at least 0.

        Example::

            for epoch in range(10):
                batches.set_epoch(epoch)
        """
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the steps that are left in this epoch."""
        return Iteration(self._iterate())

    def _iterate(self) -> Generator[Batch, None, None]:
        for batch in self.loader:
            yield Batch(mapped(self._tensor, self._selected(batch.arrays)), batch.indices, batch.weight)

    @abstractmethod
    def _tensor(self, array: Any) -> Any:
        """A tensor of the framework with an array's values."""

    def _selected(self, arrays: Any) -> Any:
        if self._columns["x"] is None:
            for name in _names(arrays):
                mapped(partial(require_unmasked, f"Batches: column {name!r}"), arrays[name])
            return arrays
        return tuple(
            mapped(partial(_found, arrays, name), columns)
            for name, columns in self._columns.items()
            if columns is not None
        )

    def _element(self, batch: Batch) -> tuple[Any, ...]:
        """Arguments of ``fit``: x, y and the weights of the rows, times the weight of the batch."""
        selected = self._selected(batch.arrays)
        if self._columns["x"] is None and (isinstance(selected, Mapping) or len(selected) not in (2, 3)):
            raise ValueError(
                f"the loader has the columns {_names(selected)}: name those of the inputs and the targets, "
                "as in Batches(loader, x=..., y=...)"
            )
        if len(selected) == 1:
            return tuple(selected)
        x, y, *weights = selected
        first = y
        while isinstance(first, (Mapping, tuple, list)):
            first = next(iter(first.values() if isinstance(first, Mapping) else first))
        own = np.asarray(weights[0] if weights else np.ones(len(first)), np.float32)
        return x, y, own * np.float32(batch.weight)

    def _template(self) -> tuple[Any, ...]:
        """An element with the dtypes, and the shapes but for the rows, of all others."""
        return self._element(self.loader._template())


def mapped(function: Callable[[Any], Any], values: Any) -> Any:
    """The results of a function for the values in nested mappings and sequences.

    Args:
        function: of one value.
        values: a value, or a mapping or sequence of such.

    Example::

        mapped(len, {"x": ("ab", "c")}) == {"x": (2, 1)}
    """
    if isinstance(values, Mapping):
        return {name: mapped(function, value) for name, value in values.items()}
    if isinstance(values, (tuple, list)):
        return tuple(mapped(function, value) for value in values)
    return function(values)


def _names(arrays: Any) -> list[Any]:
    return list(arrays if isinstance(arrays, Mapping) else range(len(arrays)))


def _found(arrays: Any, argument: str, column: Any) -> Any:
    names = _names(arrays)
    if column not in names:
        raise ValueError(f"Batches({argument}={column!r}): there is no such column; expected one of {names}")
    mapped(partial(require_unmasked, f"Batches({argument}={column!r}): the column"), arrays[column])
    return arrays[column]
