"""Arrays on real ranks."""

from __future__ import annotations

from itertools import chain

import numpy as np
import polyhvd.numpy as hvd
import pytest

from polyhvd.data import ArrayLoader

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
