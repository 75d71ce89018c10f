"""The interface of a peer, and how its sums are checked before it is timed."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from benchmarks.peers.meeting import Meeting
from benchmarks.workloads import Workload

Call = Callable[[], Any]


class Peer(abc.ABC):
    """One library in one rank. Made once; then asked for the calls to time."""

    rank: int
    size: int

    @cached_property
    def meeting(self) -> Meeting:
        """The place at which its ranks wait for each other without their library."""
        return Meeting(self.rank, self.size)

    @abc.abstractmethod
    def call(self, workload: Workload) -> Call | None:
        """A function that does `workload` once and returns when it is done; None: not offered.

        It is called by all ranks, as often by each, one call after the other.
        """

    def close(self) -> None:  # noqa: B027 - most have no connection to close
        """Leave the other ranks in good order."""


class Meets(Peer):
    """Comes before a peer without communication among the bases: its ranks wait after each call."""

    def call(self, workload: Workload) -> Call | None:
        call = super().call(workload)  # type: ignore[safe-super]
        return call and self.meeting.after(call)


def plain_place() -> tuple[int, int]:
    """Rank and size as launchers.py gives them to the ranks of libraries that have no launcher."""
    return int(os.environ["BENCH_RANK"]), int(os.environ["BENCH_SIZE"])


class Reducer(Peer):
    """A library that sums tensors: `paths` says by which function for each path of a workload."""

    @abc.abstractmethod
    def make(self, elements: int, dtype: str, value: int) -> Any:
        """A tensor full of `value`; None when there is no such dtype."""

    @abc.abstractmethod
    def fill(self, tensor: Any, value: int) -> Any:
        """The tensor with another value; in place where the framework can."""

    @abc.abstractmethod
    def ends(self, tensor: Any) -> tuple[float, float]:
        """Its first and its last element."""

    @abc.abstractmethod
    def paths(self) -> dict[str, Callable[[list[Any], str], Any]]:
        """Return a function for each path, which takes the tensors and a name, and returns the results."""

    def reducing(self, workload: Workload) -> Call | None:
        """The call for a workload of tensors, after one whose sums were right."""
        does_nothing = workload.path in ("noop", "met")
        run = self.paths().get("noop" if does_nothing else workload.path)
        if run is None:
            return None
        tensors = [self.make(n, workload.dtype, self.rank + 1) for n in workload.elements]
        if any(tensor is None for tensor in tensors):
            return None
        name = f"{workload.path}.{workload.label}.{len(tensors)}"
        results = run(tensors, name)
        if not does_nothing:
            self._check(results, workload)
        # Zeros stay zeros, however often they are summed.
        tensors[:] = [self.fill(tensor, 0) for tensor in tensors]

        def call() -> Any:
            return run(tensors, name)

        return self.meeting.after(call) if workload.path == "met" else call

    def _check(self, results: Sequence[Any], workload: Workload) -> None:
        expected = self.size * (self.size + 1) / 2
        for position, result in enumerate(results):
            if self.ends(result) != (expected, expected):
                raise ArithmeticError(
                    f"rank {self.rank}: tensor {position} of {workload.label} {workload.path} is "
                    f"{self.ends(result)} at its ends, expected {expected}"
                )

    def call(self, workload: Workload) -> Call | None:
        return self.reducing(workload) if workload.elements else None
