"""Gluon's own DataLoader over the samplers, on real ranks, with and without workers."""

from __future__ import annotations

from itertools import chain

import mxnet as mx
import polyhvd.mxnet as hvd
import pytest
from polyhvd.mxnet.samplers import DistributedBatchSampler, ElasticSampler

pytestmark = pytest.mark.ranks(2, framework="mxnet")


def of_all_ranks(samples: list[int]) -> list[int]:
    return sorted(chain(*hvd.allgather_object(samples)))


@pytest.mark.parametrize(("workers", "threads"), [(0, False), (2, False), (2, True)])
def test_every_sample_comes_once_over_a_failure(workers: int, threads: bool) -> None:
    data = mx.gluon.data.ArrayDataset(mx.nd.arange(33))
    sampler = DistributedBatchSampler(data, batch_size=4, seed=2)
    loader = mx.gluon.data.DataLoader(data, batch_sampler=sampler, num_workers=workers, thread_pool=threads)
    assert isinstance(sampler, mx.gluon.data.Sampler)
    assert len(loader) == 4
    kept: list[int] = []
    total = 0.0
    for attempt in range(2):
        for step, x in enumerate(loader):
            if attempt == 0 and step == 2:
                break
            mean = hvd.allreduce(sampler.weight * x.mean(), name=f"mean.{attempt}.{step}")
            before = sampler.cursor
            sampler.advance()
            total += mean.asscalar() * (sampler.cursor - before)
            kept += x.astype("int64").asnumpy().tolist()
        sampler.load_state_dict(sampler.state_dict())
    assert of_all_ranks(kept) == list(range(33))
    assert total == pytest.approx(sum(range(33)))


def test_an_elastic_sampler_goes_on_where_it_was_recorded() -> None:
    data = mx.gluon.data.ArrayDataset(mx.nd.arange(40))
    sampler = ElasticSampler(data, seed=2)
    assert isinstance(sampler, mx.gluon.data.Sampler)
    kept: list[int] = []
    for index, x in enumerate(mx.gluon.data.DataLoader(data, batch_size=4, sampler=sampler)):
        if index == 2:
            break
        sampler.record_batch(index, 4)
        kept += x.astype("int64").asnumpy().tolist()
    other = ElasticSampler(data, seed=2)
    other.load_state_dict(sampler.state_dict())
    for x in mx.gluon.data.DataLoader(data, batch_size=4, sampler=other):
        kept += x.astype("int64").asnumpy().tolist()
    assert of_all_ranks(kept) == list(range(40))


class OfRank(mx.gluon.data.Dataset):
    """Samples that say where they were read."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[int]:
        return [hvd.rank(), hvd.size(), hvd.local_rank()]


def test_a_worker_knows_the_place_of_its_rank() -> None:
    (found,) = mx.gluon.data.DataLoader(OfRank(), batch_size=4, num_workers=2)
    assert found.asnumpy().tolist() == [[hvd.rank(), 2, hvd.local_rank()]] * 4
