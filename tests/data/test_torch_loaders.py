"""PyTorch's own DataLoader over the samplers, on real ranks, with and without workers."""

from __future__ import annotations

from itertools import chain

import polyhvd.torch as hvd
import pytest
import torch
from polyhvd.torch.samplers import DistributedBatchSampler, ElasticSampler
from torch.utils.data import DataLoader, Sampler, TensorDataset

pytestmark = pytest.mark.ranks(2, framework="torch")


def of_all_ranks(samples: list[int]) -> list[int]:
    return sorted(chain(*hvd.allgather_object(samples)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rows", [31, 33])
def test_every_sample_comes_once_over_a_failure(rows: int, workers: int) -> None:
    """33 rows on 2 ranks with batches of 4: the row that is left over goes with the last whole step."""
    data = TensorDataset(torch.arange(rows))
    sampler = DistributedBatchSampler(data, batch_size=4, seed=2)
    assert isinstance(sampler, Sampler)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers)
    assert len(loader) == 4
    kept: list[int] = []
    total = 0.0
    for attempt in range(2):
        for step, (x,) in enumerate(loader):
            if attempt == 0 and step == 2:
                break  # as an exception would; the workers have read on
            mean = hvd.allreduce(sampler.weight * x.double().mean(), name=f"mean.{attempt}.{step}")
            before = sampler.cursor
            sampler.advance()
            total += float(mean) * (sampler.cursor - before)
            kept += x.tolist()
        sampler.load_state_dict(sampler.state_dict())
        if attempt == 0:
            assert sampler.cursor == 16
    assert of_all_ranks(kept) == list(range(rows))
    assert total == pytest.approx(sum(range(rows)))
    assert list(loader) == [], "the epoch has ended"


def test_persistent_workers_go_from_epoch_to_epoch() -> None:
    data = TensorDataset(torch.arange(20))
    sampler = DistributedBatchSampler(data, batch_size=3, seed=2)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=1, persistent_workers=True)
    epochs = []
    for _ in range(2):
        samples: list[int] = []
        for (x,) in loader:
            samples += x.tolist()
            sampler.advance()
        assert of_all_ranks(samples) == list(range(20))
        epochs.append(samples)
    assert epochs[0] != epochs[1]
    assert sampler.epoch == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_an_elastic_sampler_goes_on_where_it_was_recorded(workers: int) -> None:
    data = TensorDataset(torch.arange(40))
    sampler = ElasticSampler(data, seed=2)
    assert isinstance(sampler, Sampler)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)
    kept: list[int] = []
    for index, (x,) in enumerate(loader):
        if index == 2:
            break
        sampler.record_batch(index, 4)
        kept += x.tolist()
    other = ElasticSampler(data, seed=2)
    other.load_state_dict(sampler.state_dict())
    for (x,) in DataLoader(data, batch_size=4, sampler=other, num_workers=workers):
        kept += x.tolist()
    assert of_all_ranks(kept) == list(range(40))


class OfRank(torch.utils.data.Dataset[list[int]]):
    """Samples that say where they were read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([hvd.rank(), hvd.size(), hvd.local_rank()])


def test_a_worker_knows_the_place_of_its_rank() -> None:
    (found,) = DataLoader(OfRank(), batch_size=4, num_workers=2)
    assert found.tolist() == [[hvd.rank(), 2, hvd.local_rank()]] * 4
