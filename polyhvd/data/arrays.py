"""Batches of arrays that lie in memory, the same arrays on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from polyhvd.data.order import Indices
from polyhvd.data.position import Position

__all__ = ["ArrayLoader", "Batch"]


class Batch:
    """A rank's rows of one step: a sequence of arrays, or a mapping to arrays, as the loader was given them.

    Args:
        arrays: copies of the rows.
        indices: which rows they are, int64.
        weight: what to multiply the loss or the gradients with, so that their average over ranks is the
            mean over the rows of all ranks. It is 1.0 in steps whose rows are dealt equally.

    Example::

        for batch in loader:
            x, y = batch
            loss = batch.weight * mean_loss(x, y)
    """

    def __init__(self, arrays: Any, indices: Indices, weight: float) -> None:
        self.arrays = arrays
        self.indices = indices
        self.weight = weight

    def __iter__(self) -> Iterator[Any]:
        return iter(self.arrays)

    def __getitem__(self, key: Any) -> Any:
        return self.arrays[key]

    def __len__(self) -> int:
        return len(self.arrays)


class ArrayLoader(Position):
    """Loads batches of arrays in memory: every row of an epoch once over all ranks, however their number
    changes.

    Before each step the rank and size of the world are looked up. A step counts when :meth:`advance` is
    called, or else when the next batch is asked for; one that ends in an exception does not. All ranks have
    equally many steps. Going over the loader again after the end of an epoch begins the next one, unless
    :meth:`set_epoch` says which.

    Args:
        arrays: a sequence of arrays, or a mapping to arrays, of equally many rows. An array is what has a
            ``shape`` and can be indexed with an array of integers. Every rank has the same.
        batch_size: rows of a step for each rank. With more ranks a step has more rows.
        global_batch_size: rows of a step over all ranks, whatever their number. One of the two is given.
        shuffle: whether each epoch has an order of its own.
        seed: of the order, an integer of at least 0, the same on every rank.
        last: what becomes of the rows at the end of an epoch that fill no step. "even" deals them as evenly
            as they go, if they are fewer than ranks together with those of the step before. "short" keeps
            them apart: no batch is larger than asked for, but ranks may be left without a row, and get one
            of weight 0. "drop" leaves them out of this epoch.
        streams: into how many streams an epoch is cut; None: 64 if rows are shuffled, else 1, which keeps
            their order.
        placement: returns rank and size; None: those of the current world.

    Raises:
        ValueError: an argument is out of range, or the arrays have different numbers of rows.

    Example::

        loader = ArrayLoader([images, labels], batch_size=32, seed=1)
        for epoch in range(10):
            loader.set_epoch(epoch)
            for batch in loader:
                train(*batch, weight=batch.weight)
    """

    def __init__(
        self,
        arrays: Sequence[Any] | Mapping[str, Any],
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        last: str = "even",
        streams: int | None = None,
        placement: Callable[[], tuple[int, int]] | None = None,
    ) -> None:
        if hasattr(arrays, "shape"):
            raise ValueError("arrays is an array; put it into a list: [array]")
        self._names = list(arrays) if isinstance(arrays, Mapping) else None
        self._arrays = [a if hasattr(a, "shape") else np.asarray(a) for a in self._values(arrays)]
        if not self._arrays or any(len(array.shape) == 0 for array in self._arrays):
            raise ValueError("arrays has to have at least one array, and each of them rows")
        counts = [int(array.shape[0]) for array in self._arrays]
        if len(set(counts)) > 1:
            raise ValueError(f"the arrays have {', '.join(map(str, counts))} rows; they need equally many")
        super().__init__(
            counts[0],
            batch_size,
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            seed=seed,
            last=last,
            streams=streams,
            placement=placement,
        )

    @staticmethod
    def _values(arrays: Sequence[Any] | Mapping[str, Any]) -> list[Any]:
        return list(arrays.values() if isinstance(arrays, Mapping) else arrays)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the steps that are left in this epoch."""
        return self._iterate(self._begin())

    def _iterate(self, own: int) -> Iterator[Batch]:
        while self._iteration == own:
            place = self._place()
            step = self._next(self._cursor, place)
            if step is None:
                self._used = True
                return
            indices, weight = self._rows_of(step, place)
            taken = [array[indices] for array in self._arrays]
            named = tuple(taken) if self._names is None else dict(zip(self._names, taken, strict=True))
            entry = (step, place)
            self._under_way.append(entry)
            yield Batch(named, indices, weight)
            if self._under_way and self._under_way[0] is entry:
                self._move_on()
        raise RuntimeError("a second iteration over this loader has begun; make one loader for each")
