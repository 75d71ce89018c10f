"""The paths through Horovod's API, which polyhvd's adapters share with Horovod."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.peers.base import Reducer


class Hvd(Reducer):
    """Tensors that are reduced in place; subclasses know how to make them."""

    #: The module of polyhvd or of Horovod.
    hvd: Any

    def start(self, hvd: Any) -> None:
        self.hvd = hvd
        hvd.init()
        self.rank, self.size = hvd.rank(), hvd.size()

    def blocking(self, tensors: list[Any], name: str) -> list[Any]:
        return [self.hvd.allreduce_(tensors[0], name=name, op=self.hvd.Sum)]

    def asynchronous(self, tensors: list[Any], name: str) -> list[Any]:
        hvd = self.hvd
        return [hvd.synchronize(hvd.allreduce_async_(tensors[0], name=name, op=hvd.Sum))]

    def separate(self, tensors: list[Any], name: str) -> list[Any]:
        hvd = self.hvd
        handles = [hvd.allreduce_async_(t, name=f"{name}.{i}", op=hvd.Sum) for i, t in enumerate(tensors)]
        return [hvd.synchronize(handle) for handle in handles]

    def grouped(self, tensors: list[Any], name: str) -> list[Any]:
        hvd = self.hvd
        return list(hvd.synchronize(hvd.grouped_allreduce_async_(tensors, name=name, op=hvd.Sum)))

    def paths(self) -> dict[str, Callable[[list[Any], str], Any]]:
        return {
            "blocking": self.blocking,
            "async": self.asynchronous,
            "separate": self.separate,
            "grouped": self.grouped,
        }

    def close(self) -> None:
        self.hvd.shutdown()
