"""PyTorch on actors of Ray: training on two ranks, and an elastic job that loses one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray.cloudpickle

from polyhvd.data import ArrayLoader
from polyhvd.ray import ElasticRayExecutor, RayExecutor

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

#: Those of the suite, which tools/matrix.py names; only ranks of these tests see them.
PACKAGES = os.environ.get("SUITE_PACKAGES", "")
pytestmark = pytest.mark.skipif(
    not Path(PACKAGES, "torch").is_dir(), reason="SUITE_PACKAGES names no folder with PyTorch"
)

BUSY_S = 120.0
STEPS, ROWS, EPOCHS = 5, 48, 2


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


def lose_one(folder: Path) -> tuple[int, list[float]]:
    """Sum up all rows by a model whose arithmetic is exact; rank 1 is killed once within a step."""
    sys.path.append(PACKAGES)
    import polyhvd.torch as hvd
    import torch

    hvd.init()
    model = torch.nn.Linear(2, 1, bias=False).double()
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), op=hvd.Sum)
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, steps=0)

    def step(batch: Any) -> None:
        if state.steps == 3 and hvd.rank() == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.from_numpy(batch.arrays[0])).sum().backward()
        optimizer.step()
        state.steps += 1

    rows = np.stack([np.arange(ROWS), np.ones(ROWS)], axis=1).astype(np.float64)
    hvd.elastic.train(step, state, ArrayLoader([rows], batch_size=4, seed=7), epochs=EPOCHS)
    return hvd.size(), model.weight.detach().flatten().tolist()


def test_a_lost_rank_leaves_the_weights_bit_for_bit_the_same(tmp_path: Path) -> None:
    executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(1, 3, timeout_s=BUSY_S))
    executor.start()
    found = executor.run(lambda: lose_one(tmp_path))
    assert (tmp_path / "killed").exists()
    expected = [-0.25 * EPOCHS * sum(range(ROWS)), -0.25 * EPOCHS * ROWS]
    assert [weights for _, weights in found] == [expected] * len(found)
    assert found[0][0] == len(found) >= 2
