"""Where the ranks of a peer wait for each other, at the price of their unevenness and of nothing else."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from typing import Any

from benchmarks.workloads import KB


class Meeting:
    """A barrier in the memory that the ranks of a peer share. One for each rank, made once."""

    #: Of that memory, from its beginning.
    BYTES = 4 * KB

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.epoch = 0
        self.file = os.open(os.environ["BENCH_SHARED"], os.O_RDWR)
        self.flags = memoryview(mmap.mmap(self.file, self.BYTES)).cast("q")

    def wait(self) -> None:
        """Return when all ranks have come."""
        self.epoch += 1  # eight words apart: a cache line for each rank
        self.flags[8 * self.rank] = self.epoch
        for rank in range(self.size):
            spins = 0
            while self.flags[8 * rank] < self.epoch:
                spins += 1
                if spins % 50 == 0:
                    os.sched_yield()

    def after(self, call: Callable[[], Any]) -> Callable[[], None]:
        """The call, and a wait."""

        def met() -> None:
            call()
            self.wait()

        return met
