"""The properties that jobs of several frameworks have besides those of the others, as every rank checks them."""

from __future__ import annotations

from typing import Any

import drivers
import numpy as np
import oracle

import polyhvd

__all__ = ["disagreement", "objects", "unnamed"]

Array = np.ndarray[Any, Any]


def objects(name: str) -> None:
    """Objects go from any rank to all, and from all to all."""
    hvd = drivers.get(name).hvd
    rank, size = hvd.rank(), hvd.size()
    large = np.full(1 << 19, rank, np.float32)  # that travels without a copy
    for root in range(size):
        found = hvd.broadcast_object({"from": rank, "large": large}, root_rank=root)
        assert found["from"] == root
        assert found["large"][-1] == root
    assert hvd.allgather_object([rank] * rank) == [[r] * r for r in range(size)]


def unnamed(name: str) -> None:
    """Calls without a name match by their order."""
    driver = drivers.get(name)
    hvd = driver.hvd
    rank, size = hvd.rank(), hvd.size()
    for step in range(3):
        terms = [oracle.contribution(np.dtype(np.float32), (size, 3), r, step) for r in range(size)]
        x = driver.from_numpy(terms[rank])
        oracle.check("sum", driver.to_numpy(hvd.allreduce(x, op=hvd.Sum)), oracle.reduce("Sum", terms))
        gathered = driver.to_numpy(hvd.allgather(x))
        oracle.check("rows", gathered, np.concatenate(terms), exact=True)
        sent = driver.to_numpy(hvd.broadcast(x, size - 1))
        oracle.check("broadcast", sent, terms[-1], exact=True)
        parts = driver.to_numpy(hvd.alltoall(x))
        oracle.check("parts", parts, np.stack([term[rank] for term in terms]), exact=True)
        hvd.barrier()


def disagreement(name: str) -> None:
    """Ranks that disagree all hear of it, with every rank's side; the next call of that name is new."""
    driver = drivers.get(name)
    hvd = driver.hvd
    rank, size = hvd.rank(), hvd.size()
    error: BaseException | None = None
    try:
        driver.to_numpy(hvd.allgather(driver.from_numpy(np.ones((2, 3 + rank), np.float32)), name="w"))
    except Exception as caught:
        error = caught
    assert isinstance(error, driver.error_type()), repr(error)
    assert isinstance(error, polyhvd.HorovodInternalError), repr(error)
    for part in ("'w'", *(f"rank {r}" for r in range(size))):
        assert part in str(error), error
    gathered = driver.to_numpy(hvd.allgather(driver.from_numpy(np.ones((1, 2), np.float32)), name="w"))
    oracle.check("after a disagreement", gathered, np.ones((size, 2), np.float32))
