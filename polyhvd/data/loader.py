"""Batches, and the loop over the steps of an epoch that all loaders share."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator
from typing import Any, Generic, TypeVar

from polyhvd.data.counting import count, waiting
from polyhvd.data.order import Indices, Step
from polyhvd.data.position import Place, Position, current_place

__all__ = ["Batch", "Iteration", "Loader"]

T = TypeVar("T")


class Batch:
    """A rank's rows of one step: a sequence of arrays, or a mapping to arrays, as the loader was given them.

    Args:
        arrays: copies of the rows.
        indices: which rows they are, int64.
        weight: what to multiply the loss or the gradients with, so that their average over ranks is the
            mean over the rows of all ranks. It is 1.0 in steps in which all ranks have as many rows.

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


class Iteration(Generic[T]):
    """A generator that raises an error again after it has failed, where a generator seems to be at its end.

    Args:
        batches: the generator.
    """

    def __init__(self, batches: Generator[T, None, None]) -> None:
        self._batches = batches
        self._failure = ""

    def __iter__(self) -> Iteration[T]:
        return self

    def __next__(self) -> T:
        if self._failure:
            raise RuntimeError(
                f"this iteration has ended with an error ({self._failure}), before the end of the epoch: "
                "begin another one, which continues with the batch that was not loaded"
            )
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}".rstrip(": ")
            raise

    def close(self) -> None:
        """Leave the loop."""
        self._batches.close()


class Loader(Position, ABC):
    """Loads the batch of each step for this rank; users see it through the classes derived from it."""

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the steps that are left in this epoch.

        Raises:
            RuntimeError: this is one of several workers of a ``DataLoader`` of PyTorch; or its only worker,
                and ``placement`` was not given; or, of the iterator, an error has ended it before.
        """
        self._require_single()
        return Iteration(self._iterate(self._begin()))

    def _iterate(self, own: int) -> Generator[Batch, None, None]:
        try:
            while self._iteration == own:
                place = self._place()
                step = self._next(self._cursor, place)
                if step is None:
                    self._report_no_step(self._cursor, place)
                    self._require_agreement(at_end=True)
                    self._used = True
                    return
                with waiting():
                    batch = self._counted(step, place)
                entry = (step, place)
                self._under_way.append(entry)
                yield batch
                if self._under_way and self._under_way[0] is entry:
                    self._move_on()
            raise RuntimeError("a second iteration over this loader has begun; make one loader for each")
        finally:
            if self._iteration == own:
                self._end()

    def _read_ahead(self) -> Iterator[Batch]:
        """The batches that are left, for a pipeline that is ahead of the steps; see :meth:`_go_ahead`."""
        self._require_single()
        own = self._begin()
        try:
            yield from self._go_ahead(own, self._counted)
            self._require_agreement(at_end=True)
        finally:
            if self._iteration == own:
                self._end()

    def _counted(self, step: Step, place: Place) -> Batch:
        """:meth:`_load`, in the counters."""
        self._require_agreement()
        batch = self._load(step, place)
        rows = len(batch.indices) if batch.weight else 0
        count(data_batches=1, data_rows=rows, data_rows_skipped=step.share(place.rank) - rows)
        return batch

    def _require_single(self) -> None:
        """Raise RuntimeError in workers of PyTorch, which have no rank or would all load the same batches."""
        loading = sys.modules.get("torch.utils.data")
        worker = None if loading is None else loading.get_worker_info()
        if worker is None or (worker.num_workers == 1 and self._placement is not current_place):
            return
        raise RuntimeError(
            f"{type(self).__name__} is iterated over in worker {worker.id} of a torch DataLoader with "
            f"num_workers={worker.num_workers}: each worker would load all batches of its rank, and the "
            "position would stay where it is; iterate over the loader, or polyhvd.torch.data.Batches of it, "
            "without a DataLoader (they read ahead in threads), or use num_workers=0"
        )

    @abstractmethod
    def _load(self, step: Step, place: Place) -> Batch:
        """The batch of a step of the current epoch."""

    def _template(self) -> Batch:
        """A batch of any number of rows, which has the dtypes and the shapes of rows of all others."""
        place = self._place()
        step = self._next(0, place)
        if step is None:
            raise ValueError("the data has no row, so that the types of its columns are not known")
        try:
            return self._load(step, place)
        finally:
            self._end()

    def _end(self) -> None:
        """Release what an iteration has needed."""
