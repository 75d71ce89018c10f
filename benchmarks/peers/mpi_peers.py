"""MPI through mpi4py, whichever library the launcher has chosen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.peers.base import Reducer
from benchmarks.peers.numpy_peers import Arrays


class Mpi(Arrays, Reducer):
    """Open MPI or MPICH. It has no groups: a buffer stands in for them."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.world.Get_rank(), self.world.Get_size()
        self.buffer = np.empty(0, np.float32)

    def make(self, elements: int, dtype: str, value: int) -> Any:
        if dtype in ("float16", "bfloat16"):
            return None
        return super().make(elements, dtype, value)

    def separate(self, tensors: list[Any], name: str) -> list[Any]:
        for tensor in tensors:
            self.world.Allreduce(self.mpi.IN_PLACE, tensor)
        return tensors

    def waited(self, tensors: list[Any], name: str) -> list[Any]:
        self.mpi.Request.Waitall([self.world.Iallreduce(self.mpi.IN_PLACE, t) for t in tensors])
        return tensors

    def packed(self, tensors: list[Any], name: str) -> list[Any]:
        total = sum(tensor.size for tensor in tensors)
        if self.buffer.size < total:
            self.buffer = np.empty(total, np.float32)
        buffer, at = self.buffer[:total], 0
        for tensor in tensors:
            buffer[at : at + tensor.size] = tensor
            at += tensor.size
        self.world.Allreduce(self.mpi.IN_PLACE, buffer)
        at = 0
        for tensor in tensors:
            tensor[:] = buffer[at : at + tensor.size]
            at += tensor.size
        return tensors

    def paths(self) -> dict[str, Callable[[list[Any], str], Any]]:
        return {
            "blocking": self.separate,
            "async": self.waited,
            "separate": self.separate,
            "grouped": self.packed,
        }
