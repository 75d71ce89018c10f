"""Batches that are made ahead of the steps, by a thread or by processes that it feeds."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from typing import Any

import numpy.typing as npt

from polyhvd.data.finishing import Finishing, Made
from polyhvd.data.patience import look
from polyhvd.data.prefetch import Prefetch
from polyhvd.data.waiting import LOOK_S
from polyhvd.data.workers import Task, Workers
from polyhvd.errors import DataError

__all__ = ["Ahead"]

#: Batches that a process works on or that wait for it or the program; a batch has three descriptors at most.
_TASKS_MAX = 8

#: The arrays of a step, the last of which has the numbers of the rows, and its weight.
_Steps = Generator[tuple[list[npt.NDArray[Any]], float], None, None]


class Ahead:
    """Makes batches ahead by a bounded number of bytes.

    Args:
        steps: rows of each step. Only the thread uses it.
        finishing: makes a batch of them.
        workers: processes in which it does that; None: the thread does it.
        bytes_max: of batches ahead. One batch, or one for each process, is always allowed. A batch that a
            process has not made yet counts as the largest one so far.
        epoch, number: of the first batch, for errors.
        label: the loader, for reports of long waits.
        reading: returns the row groups that are being read, likewise.
    """

    def __init__(
        self,
        steps: _Steps,
        finishing: Finishing,
        workers: Workers | None,
        *,
        bytes_max: int,
        epoch: int,
        number: int,
        label: str,
        reading: Callable[[], list[str]],
    ) -> None:
        self._epoch, self._number = epoch, number
        self._label, self._reading = label, reading
        self._ahead: Prefetch[Made | Task]
        if workers is None:
            self._ahead = Prefetch(
                _made(steps, finishing), bytes_max, is_in_program=lambda: finishing.is_running
            )
        else:
            self._ahead = Prefetch(
                _submitted(steps, workers),
                bytes_max,
                items_min=workers.count,
                items_max=_TASKS_MAX * workers.count,
                is_in_program=lambda: False,
            )

    @property
    def is_usable(self) -> bool:
        """Whether this process has the thread, which a forked child does not, and it was not closed."""
        return self._ahead.is_usable

    def next(self) -> Made:
        """The next batch.

        Raises:
            DataError: rows cannot be read or decoded, a process has ended, or the wait has lasted as long as
                a stall that ends the job.
            Exception: what a function of the user raised, with a note that has the number of the batch.
        """
        try:
            item = self._ahead.next(lambda waited_s: self._look(waited_s, "is not ready"))
            made: Made = item.result() if isinstance(item, Task) else item
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"in batch {self._number} of epoch {self._epoch}, counted from 0")
            raise
        self._number += 1
        return made

    def close(self) -> bool:
        """:meth:`Prefetch.close`."""
        return self._ahead.close()

    def ends_within(self, limit_s: float | None) -> bool:
        """:meth:`Prefetch.ends_within`.

        Raises:
            DataError: it has no limit, and has lasted as long as a stall that ends the job.
        """
        if limit_s is not None:
            return self._ahead.ends_within(limit_s)
        waited_s = 0.0
        while not self._ahead.ends_within(LOOK_S):
            waited_s += LOOK_S
            self._look(
                waited_s, "of a loop that was left is still being made, and the next loop waits for it"
            )
        return True

    def _look(self, waited_s: float, what: str) -> None:
        look(waited_s, lambda: self._described(what))

    def _described(self, what: str) -> str:
        reading = self._reading()
        shown = "; ".join(reading[:4]) + f" and {len(reading) - 4} more" * (len(reading) > 4)
        return (
            f"{self._label}: batch {self._number} of epoch {self._epoch} {what}; "
            + f"being read: {shown}; " * bool(reading)
            + f"the thread that prepares batches is at:\n{self._ahead.where()}"
        )


def _made(steps: _Steps, finishing: Finishing) -> Iterator[tuple[int, Made]]:
    with closing(steps):  # its threads end here, also while an exception still has its frames
        for (*arrays, numbers), share in steps:
            made = finishing(arrays, numbers, share)
            yield made.bytes, made


def _submitted(steps: _Steps, workers: Workers) -> Iterator[tuple[int, Task]]:
    first: Task | None = None
    with closing(steps):
        for number, ((*arrays, numbers), share) in enumerate(steps, 1):
            task = workers.submit((arrays, numbers, share))
            first = first or task
            if number == workers.count:  # how large batches are decides how many more there may be
                with suppress(DataError):  # the program gets it when it asks for the batch
                    first.wait()
            yield workers.largest_bytes, task
