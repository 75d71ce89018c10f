"""The collectives that ``polyhvd bench`` times, through the module that a user imports.

The size of a row is, as in nccl-tests, that of the whole result or of the whole input, whichever is larger.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import polyhvd
from polyhvd.bench.limits import copy_seconds
from polyhvd.collectives.adapter import ReduceOp
from polyhvd.installed import frameworks

__all__ = ["OPS", "REDOPS", "Framework", "Plan", "Row", "measure", "measured"]

#: Part of the size that crosses each rank's border, by number of ranks: bus over algorithm bandwidth.
OPS: dict[str, Callable[[int], float]] = {
    "allreduce": lambda n: 2 * (n - 1) / n,
    "allgather": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "reducescatter": lambda n: (n - 1) / n,
    "alltoall": lambda n: (n - 1) / n,
}
REDOPS = {
    "sum": ReduceOp.Sum,
    "average": ReduceOp.Average,
    "min": ReduceOp.Min,
    "max": ReduceOp.Max,
    "prod": ReduceOp.Product,
}
_REDUCING = ("allreduce", "reducescatter")
_BUDGET_S = 0.5
_ITERATIONS_MAX = 2000


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    sizes: list[int]
    redop: str
    iterations: int | None  # None: as many as the time allows
    warm_up: int


@dataclass(frozen=True)
class Row:
    """A line of the table. Seconds are of the slowest rank, the median over the iterations."""

    op: str
    bytes: int
    count: int
    dtype: str
    redop: str
    root: int
    iterations: int
    seconds: float
    fastest_s: float
    slowest_s: float
    copy_s: float
    ranks: int

    @property
    def algbw(self) -> float:
        """Bytes of the row per nanosecond: GB/s."""
        return self.bytes / self.seconds / 1e9

    @property
    def busbw(self) -> float:
        """Bus bandwidth: bytes per second and link of a ring; comparable over numbers of ranks."""
        return self.algbw * OPS[self.op](self.ranks)


def measured() -> dict[str, Callable[[Any, int, str], Any]]:
    """How the frameworks that can be measured make tensors, by the names of the frameworks."""
    return {name: each.ones for name, each in frameworks().items() if each.ones is not None}


class Framework:
    """A framework by the name that the user gave: its tensors, and polyhvd's module for it."""

    def __init__(self, name: str, dtype: str) -> None:
        """Import it; raises ValueError when it or the dtype is not there."""
        self.name, self.dtype = name, dtype
        self._made, self._finish = measured()[name], frameworks()[name].finish
        try:
            self.hvd: Any = importlib.import_module(f"polyhvd.{name}")
            self.module: Any = importlib.import_module(name)
            self.item_bytes = self._item_bytes()
            self.ones(1)
        except ImportError as error:
            raise ValueError(f"--framework {name}: {error}; install it, or take another framework") from None
        except (AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"--dtype {dtype}: {name} does not have it ({error})") from None

    def _item_bytes(self) -> int:
        if self.dtype == "bfloat16":
            return 2
        return np.dtype(self.dtype).itemsize

    def ones(self, count: int) -> Any:
        """A new tensor of this many elements."""
        return self._made(self.module, count, self.dtype)

    def finish(self, result: Any) -> None:
        """Wait for a result, where the framework has not done so."""
        if self._finish is not None:
            self._finish(result)

    def call(self, op: str, count: int, redop: str, ranks: int) -> Callable[[], Any]:
        """A function that runs one collective whose larger side has `count` elements."""
        hvd, name = self.hvd, f"bench.{op}.{count}"
        share = self.ones(count // ranks) if op == "allgather" else self.ones(count)
        reduction = REDOPS[redop]
        in_place = hasattr(hvd, "allreduce_")  # TensorFlow's tensors cannot be written to
        calls: dict[str, Callable[[], Any]] = {
            "allreduce": lambda: (hvd.allreduce_ if in_place else hvd.allreduce)(
                share, name=name, op=reduction
            ),
            "allgather": lambda: hvd.allgather(share, name=name),
            "broadcast": lambda: (hvd.broadcast_ if in_place else hvd.broadcast)(
                share, root_rank=0, name=name
            ),
            "reducescatter": lambda: hvd.reducescatter(share, name=name, op=reduction),
            "alltoall": lambda: hvd.alltoall(share, name=name),
        }
        run = calls[op]
        return lambda: self.finish(run())


def measure(framework: Framework, op: str, plan: Plan) -> Iterator[Row]:
    """Yield a row for each size, the same on every rank; every rank must call it."""
    ranks = polyhvd.size()
    done = set()
    for size in plan.sizes:
        # Whole shares for every rank, so that all of them send the same number of bytes.
        count = max(ranks, size // framework.item_bytes // ranks * ranks)
        if count in done:
            continue
        done.add(count)
        call = framework.call(op, count, plan.redop, ranks)
        times = _times(call, plan)
        copied = max(polyhvd.allgather_object(copy_seconds(count * framework.item_bytes)))
        yield Row(
            op=op,
            bytes=count * framework.item_bytes,
            count=count,
            dtype=framework.dtype,
            redop=plan.redop if op in _REDUCING else "none",
            root=0 if op == "broadcast" else -1,
            iterations=len(times),
            seconds=statistics.median(times),
            fastest_s=min(times),
            slowest_s=max(times),
            copy_s=copied,
            ranks=ranks,
        )


def _times(call: Callable[[], Any], plan: Plan) -> list[float]:
    """Seconds of each iteration on the rank that took longest for it."""
    begin = time.perf_counter()
    for _ in range(plan.warm_up):
        call()
    once = (time.perf_counter() - begin) / plan.warm_up
    wanted = plan.iterations or max(5, min(_ITERATIONS_MAX, int(_BUDGET_S / max(once, 1e-9))))
    count: int = polyhvd.broadcast_object(wanted)
    times = []
    for _ in range(count):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return [max(slowest) for slowest in zip(*polyhvd.allgather_object(times), strict=True)]
