"""NumPy: polyhvd on arrays, and the floor, where every rank's vector lies in memory that all share."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers.base import Call, Peer, plain_place
from benchmarks.peers.hvd import Hvd
from benchmarks.peers.meeting import Meeting
from benchmarks.workloads import KB, Workload


def numpy_dtype(name: str) -> Any:
    if name == "bfloat16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return np.dtype(name)


class Arrays:
    """How arrays are made, filled and read."""

    rank: int

    def make(self, elements: int, dtype: str, value: int) -> Any:
        return np.full(elements, value, numpy_dtype(dtype))

    def fill(self, tensor: Any, value: int) -> Any:
        tensor[...] = value
        return tensor

    def ends(self, tensor: Any) -> tuple[float, float]:
        return float(tensor[0]), float(tensor[-1])


class PolyhvdNumpy(Arrays, Hvd):
    """polyhvd.numpy."""

    def __init__(self) -> None:
        import polyhvd.numpy

        self.start(polyhvd.numpy)


class Floor(Peer):
    """The limit of memory: vectors that are shared already are added where they lie.

    Each rank adds its slice of all vectors, in pieces that stay in its cache, and writes the sum to all of
    them. No copies into or out of shared memory, no names, no handles.
    """

    PIECE = 128 * KB

    def __init__(self) -> None:
        self.rank, self.size = plain_place()

    def call(self, workload: Workload) -> Call | None:
        calls: dict[str, Callable[[Workload], Call]] = {
            "blocking": self._sum,
            "separate": self._sum,
            "copy": self._copy,
        }
        make = calls.get(workload.path)
        if make is None or (make == self._sum and workload.dtype != "float32"):
            return None
        return make(workload)

    def _copy(self, workload: Workload) -> Call:
        count = workload.elements[0]
        # Pages: copies that begin elsewhere may be far slower; see docs/internals/where-time-goes.md.
        source, target = (np.frombuffer(mmap.mmap(-1, count), workload.dtype) for _ in range(2))
        source[:], target[:] = 1, 0
        return lambda: np.copyto(target, source)

    def _sum(self, workload: Workload) -> Call:
        count = sum(workload.elements)
        memory = mmap.mmap(self.meeting.file, Meeting.BYTES + self.size * count * 4)
        vectors = [
            np.frombuffer(memory, np.float32, count, Meeting.BYTES + r * count * 4) for r in range(self.size)
        ]
        vectors[self.rank][:] = self.rank + 1
        begin, end = count * self.rank // self.size, count * (self.rank + 1) // self.size

        meet = self.meeting.wait

        def run() -> None:
            meet()
            for at in range(begin, end, self.PIECE):
                piece = slice(at, min(end, at + self.PIECE))
                total = vectors[0][piece]
                for vector in vectors[1:]:
                    np.add(total, vector[piece], out=total)
                for vector in vectors[1:]:
                    vector[piece] = total
            meet()

        run()
        expected = self.size * (self.size + 1) / 2
        if vectors[self.rank][0] != expected or vectors[self.rank][-1] != expected:
            raise ArithmeticError(f"rank {self.rank}: the floor's sum of {workload.label} is wrong")
        meet()
        vectors[self.rank][:] = 0
        meet()
        return run
