"""Arrays on real ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
import pytest
from ranks_alive import wait_until

from polyhvd.data import ArrayLoader, DataError, DistributedBatchSampler, agreement

pytestmark = pytest.mark.ranks(2, 3)


@pytest.mark.parametrize("rows", [1, 2, 23, 24, 25])
def test_every_row_comes_once_and_weighted_means_are_those_of_rows(rows: int) -> None:
    x = np.random.default_rng(1).normal(size=(rows, 3))
    loader = ArrayLoader([x], batch_size=4, seed=5)
    seen: list[int] = []
    for step, batch in enumerate(loader):
        mean = hvd.allreduce(batch.weight * batch[0].mean(axis=0), name=f"mean.{step}")
        indices = [*chain(*hvd.allgather_object(batch.indices.tolist() if batch.weight else []))]
        assert np.allclose(mean, x[indices].mean(axis=0))
        seen += indices
    assert sorted(seen) == list(range(rows))
    states = hvd.allgather_object(loader.state_dict())
    assert states == [states[0]] * hvd.size()


def test_a_world_that_ends_and_begins_again_goes_on_in_the_epoch() -> None:
    loader = ArrayLoader([np.arange(40)], batch_size=4, seed=5)
    batches = iter(loader)
    seen = [next(batches).indices.tolist()]
    loader.advance()
    hvd.shutdown()
    hvd.init()
    seen += [batch.indices.tolist() for batch in batches]
    assert sorted(chain(*chain(*hvd.allgather_object(seen)))) == list(range(40))


def iterate(batches: Iterable[Any]) -> None:
    for _ in batches:
        hvd.allreduce(np.ones(1), name="step")


@pytest.mark.parametrize(
    ("rows", "options", "difference"),
    [
        (1, {}, r"number of 'rows': 40 on rank.* 0.*; 41 on rank 1; all ranks need the same data"),
        (0, {"seed": 1}, r"argument 'seed': 0 on rank.* 0.*; 1 on rank 1; all ranks need the same data"),
        (0, {"batch_size": 3}, "argument 'batch_size': 2 on rank.* 0.*; 3 on rank 1;"),
    ],
)
@pytest.mark.parametrize("is_sampler", [False, True])
def test_other_rows_or_arguments_on_one_rank_are_an_error_on_every_rank(
    is_sampler: bool, rows: int, options: dict[str, Any], difference: str
) -> None:
    count = 40 + rows * (hvd.rank() == 1)
    chosen = {"batch_size": 2, **(options if hvd.rank() == 1 else {})}
    data = count if is_sampler else [np.arange(count)]
    loader = (DistributedBatchSampler if is_sampler else ArrayLoader)(data, **chosen)  # type: ignore[operator]
    name = type(loader).__name__
    with pytest.raises(DataError, match=rf"{name}\(test_array_ranks.py:\d+\): .*{difference}"):
        iterate(loader)


class SeenLater:
    """A handle that is done, but not at the first look."""

    def __init__(self, handle: Any) -> None:
        self._handle, self._looks = handle, 0

    def done(self) -> bool:
        self._looks += 1
        return self._looks > 1 and self._handle.done()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def test_the_error_is_the_same_if_one_rank_sees_the_difference_a_batch_later() -> None:
    loader = ArrayLoader([np.arange(40)], batch_size=2, seed=int(hvd.rank() == 1))
    batches = 0

    def train() -> None:
        nonlocal batches
        for _ in loader:
            batches += 1
            if batches == 1:
                hvd.barrier()
                if hvd.rank() == 0:
                    loader._agreement._handle = SeenLater(loader._agreement._handle)
            hvd.allreduce(np.ones(1), name="step")

    with pytest.raises(DataError, match=r"argument 'seed': 0 on rank.* 0.*; 1 on rank 1"):
        train()
    assert hvd.allgather_object(batches) == [2] * hvd.size()


def test_rank_that_is_frozen_during_the_comparison_is_waited_for_with_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "_FIRST_WAIT_S", 0.2)
    monkeypatch.setattr(agreement, "_WAIT_S", 0.5)
    raised = Path(hvd.broadcast_object(str(tmp_path))) / "raised"
    frozen = hvd.size() - 1
    loader = ArrayLoader([np.arange(40)], batch_size=2, seed=int(hvd.rank() == frozen))
    batches = iter(loader)
    next(batches)
    wait_until(lambda: loader._agreement._handle.done(), "the ranks have exchanged their checksums", 60)
    hvd.barrier()
    if hvd.rank() == frozen:
        waits = f"for i in $(seq 600); do [ -e {raised} ] && break; sleep 0.1; done; kill -CONT {os.getpid()}"
        with subprocess.Popen(["sh", "-c", waits]):
            os.kill(os.getpid(), signal.SIGSTOP)
    others = "rank 0" if frozen == 1 else "ranks 0, 1"
    seen: list[Any] = []
    with pytest.raises(DataError) as error:
        seen.extend(batches)
    if hvd.rank() == 0:
        raised.touch()
        assert f"{others} and rank {frozen} have different data, arguments or positions" in str(error.value)
        assert len(seen) < 2
    hvd.barrier()


def test_arrays_of_other_forms_on_one_rank_are_an_error_on_every_rank() -> None:
    loader = ArrayLoader({"x": np.zeros((20, 3 + (hvd.rank() == 1)), np.float32)}, batch_size=1)
    with pytest.raises(DataError, match=r"array 'x': float32\[3\] on rank.* 0.*; float32\[4\] on rank 1;"):
        iterate(loader)


@pytest.mark.parametrize("is_sampler", [False, True])
@pytest.mark.parametrize("moved", ["cursor", "epoch"])
def test_other_position_on_one_rank_is_an_error_on_every_rank(is_sampler: bool, moved: str) -> None:
    loader = DistributedBatchSampler(40, 1) if is_sampler else ArrayLoader([np.arange(40)], 1)
    if hvd.rank() == 1:
        loader.load_state_dict({**loader.state_dict(), moved: 6})
    with pytest.raises(DataError, match=f"position '{moved}': 0 on rank.* 0.*; 6 on rank 1; have all ranks"):
        iterate(loader)


def test_epochs_of_ranks_may_differ_where_rows_are_not_shuffled() -> None:
    loader = ArrayLoader([np.arange(12)], batch_size=1, shuffle=False)
    loader.set_epoch(hvd.rank())
    iterate(loader)
    hvd.barrier()


def test_loader_of_a_former_world_counts_among_those_that_a_new_process_makes() -> None:
    """Rank 1 makes its loader again in the second world, as a process does that joins an elastic job."""
    loaders: dict[int, ArrayLoader] = {}
    for world, number in ((1, 0), (2, 0), (2, 1)):
        if (world, number) == (2, 0):
            hvd.shutdown()
            hvd.init()
        if number not in loaders or hvd.rank() == 1:
            seed = number if hvd.rank() == 1 else 0
            loaders[number] = ArrayLoader([np.arange(12)], batch_size=1, shuffle=False, seed=seed)
        loaders[number].set_epoch(world)
        with pytest.raises(DataError, match="argument 'seed'") if number == 1 else contextlib.nullcontext():
            iterate(loaders[number])
