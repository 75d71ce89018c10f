"""What a user writes with polyhvd.jax, as a type checker sees it; see tools/typecheck.py."""

from __future__ import annotations

from typing import Any

import jax
import polyhvd.jax as hvd
from typing_extensions import assert_type

from polyhvd.collectives.adapter import Handle


def main(weights: jax.Array, gradients: list[jax.Array], params: dict[str, jax.Array]) -> float:
    even = hvd.ProcessSet(range(0, 4, 2))
    hvd.init(process_sets=[even])
    assert_type(hvd.broadcast_parameters(params, root_rank=0), dict[str, jax.Array])
    assert_type(hvd.allreduce(weights, op=hvd.Sum, compression=hvd.Compression.fp16), jax.Array)
    assert_type(hvd.grouped_allreduce(gradients, process_set=even), list[jax.Array])
    assert_type(hvd.alltoall(weights), jax.Array)
    assert_type(hvd.alltoall(weights, [1, 2]), tuple[jax.Array, jax.Array])
    handle = hvd.broadcast_async(weights, 0)
    assert_type(handle, Handle[jax.Array])
    assert_type(hvd.synchronize(handle), jax.Array)
    reduced = hvd.DistributedGradients(op=hvd.Average, groups=2)
    assert_type(reduced(params), dict[str, jax.Array])
    with hvd.translated_errors():
        assert_type(hvd.value_and_grad(lambda w: w.sum())(weights), tuple[Any, Any])
    hvd.allreduce(weights, opp=hvd.Sum)  # type: ignore[call-arg]
    hvd.broadcast(weights)  # type: ignore[call-arg]
    return float(hvd.allreduce(0.5))
