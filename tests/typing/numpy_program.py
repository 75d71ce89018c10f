"""What a user writes with polyhvd.numpy, as a type checker sees it; see tools/typecheck.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import polyhvd.numpy as hvd
from typing_extensions import assert_type

from polyhvd.collectives.adapter import Handle

Array = np.ndarray[Any, Any]


def main(weights: Array, gradients: list[Array]) -> float:
    even = hvd.ProcessSet(range(0, 4, 2))
    hvd.init(process_sets=[even])
    hvd.broadcast_parameters({"weights": weights}, root_rank=0)
    assert_type(hvd.allreduce(weights, op=hvd.Sum, name="weights", compression=hvd.Compression.fp16), Array)
    assert_type(hvd.allreduce_(weights, process_set=even), Array)
    assert_type(hvd.grouped_allreduce(gradients), list[Array])
    assert_type(hvd.allgather(weights), Array)
    assert_type(hvd.alltoall(weights), Array)
    assert_type(hvd.alltoall(weights, [1, 2]), tuple[Array, Array])
    assert_type(hvd.alltoall(weights, splits=np.array([1, 2]), name="rows"), tuple[Array, Array])
    assert_type(hvd.synchronize(hvd.allreduce_async(weights)), Array)
    assert_type(hvd.synchronize(hvd.grouped_allreduce_async_(gradients)), list[Array])
    assert_type(hvd.synchronize(hvd.alltoall_async(weights)), tuple[Array, Array])
    handle = hvd.broadcast_async(weights, 0)
    assert_type(handle, Handle[Array])
    assert_type(hvd.poll(handle), bool)
    assert_type(hvd.rank() + hvd.size(), int)
    hvd.allreduce("weights")  # type: ignore[arg-type]
    hvd.allreduce(weights, opp=hvd.Sum)  # type: ignore[call-arg]
    hvd.allreduce_(1.0)  # type: ignore[arg-type]
    hvd.broadcast(weights)  # type: ignore[call-arg]
    return float(hvd.allreduce(0.5)[()])
