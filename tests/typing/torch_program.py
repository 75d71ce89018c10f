"""What a user writes with polyhvd.torch, as a type checker sees it; see tools/typecheck.py."""

from __future__ import annotations

import polyhvd.torch as hvd
import torch
from typing_extensions import assert_type

from polyhvd.collectives.adapter import Handle

Tensor = torch.Tensor


def main(model: torch.nn.Module, weights: Tensor, gradients: list[Tensor]) -> float:
    even = hvd.ProcessSet(range(0, 4, 2))
    hvd.init(process_sets=[even])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    assert_type(hvd.allreduce(weights, op=hvd.Sum, name="weights", compression=hvd.Compression.fp16), Tensor)
    assert_type(hvd.allreduce_(weights, process_set=even), Tensor)
    assert_type(hvd.grouped_allreduce(gradients), list[Tensor])
    assert_type(hvd.allgather(weights), Tensor)
    assert_type(hvd.alltoall(weights), Tensor)
    assert_type(hvd.alltoall(weights, [1, 2]), tuple[Tensor, Tensor])
    assert_type(hvd.alltoall(weights, splits=torch.tensor([1, 2]), name="rows"), tuple[Tensor, Tensor])
    assert_type(hvd.synchronize(hvd.allreduce_async(weights)), Tensor)
    assert_type(hvd.synchronize(hvd.grouped_allreduce_async_(gradients)), list[Tensor])
    assert_type(hvd.synchronize(hvd.alltoall_async(weights)), tuple[Tensor, Tensor])
    handle = hvd.broadcast_async(weights, 0)
    assert_type(handle, Handle[Tensor])
    assert_type(hvd.poll(handle), bool)
    assert_type(hvd.rank() + hvd.size(), int)
    plain = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), op=hvd.Sum)
    assert_type(optimizer, torch.optim.Adam)
    torch.optim.lr_scheduler.StepLR(optimizer, step_size=1)
    hvd.DistributedOptimizer(model)  # type: ignore[type-var]
    hvd.DistributedOptimizer(plain, compresion=None)  # type: ignore[call-arg]
    hvd.allreduse(weights)  # type: ignore[attr-defined]
    hvd.allreduce("weights")  # type: ignore[arg-type]
    hvd.allreduce(weights, opp=hvd.Sum)  # type: ignore[call-arg]
    hvd.allreduce_(1.0)  # type: ignore[arg-type]
    hvd.broadcast(weights)  # type: ignore[call-arg]
    return hvd.allreduce(0.5).item()
