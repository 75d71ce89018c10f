"""PyTorch on actors of Ray; test_ray_elastic.py has its elastic jobs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.cloudpickle

from polyhvd.ray import RayExecutor

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Those of the suite, which tools/matrix.py names; only ranks of these tests see them.
PACKAGES = os.environ.get("SUITE_PACKAGES", "")
pytestmark = pytest.mark.skipif(
    not Path(PACKAGES, "torch").is_dir(), reason="SUITE_PACKAGES names no folder with PyTorch"
)

BUSY_S = 120.0
STEPS = 5


def regression(rank: int, size: int) -> tuple[Any, list[float]]:
    """The weights, and the losses, of a small network that is trained on every size-th row."""
    import polyhvd.torch as hvd
    import torch

    torch.manual_seed(1)
    x, y = torch.randn(32, 4), torch.randn(32, 1)
    torch.manual_seed(rank)  # other weights on each rank, until they are broadcast
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if size > 1:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x[rank::size]), y[rank::size])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [weight.detach().numpy() for weight in model.parameters()], losses


def test_two_ranks_train_what_one_process_trains_on_all_rows() -> None:
    def train() -> Any:
        sys.path.append(PACKAGES)
        import polyhvd.torch as hvd

        hvd.init()
        return regression(hvd.rank(), hvd.size())

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=BUSY_S), num_workers=2)
    executor.start()
    try:
        (first, losses), (second, _) = executor.run(train)
        (oracle, _) = executor.execute_single(lambda _: regression(0, 1))
    finally:
        executor.shutdown()
    for mine, other, expected in zip(first, second, oracle, strict=True):
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-6)
    assert losses[-1] < losses[0]
