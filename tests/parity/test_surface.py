"""Names that every framework's module has, and what process sets say of themselves."""

from __future__ import annotations

import pickle

import drivers
import numpy as np
import pytest
from worlds import Ranks

import polyhvd
from polyhvd import errors

pytestmark = pytest.mark.sizes(3)


def offer_errors(name: str) -> None:
    hvd = drivers.get(name).hvd
    for error in errors.__all__:
        assert getattr(hvd, error) is getattr(polyhvd, error), error
        assert error in hvd.__all__, error
    assert hvd.gpu_available("no such framework") is False
    assert hvd.gpu_available(drivers.get(name).framework, verbose=True) in (False, True)


def test_every_module_offers_the_errors_that_it_raises(ranks: Ranks) -> None:
    ranks.run(offer_errors)


def describe_the_world(name: str) -> None:
    hvd = drivers.get(name).hvd
    world = hvd.global_process_set
    everybody = list(range(hvd.size()))
    assert world.ranks == everybody
    assert str(world) == f"ProcessSet(process_set_id=0, ranks={everybody}, mpi_comm=None)"
    assert pickle.loads(pickle.dumps(world)) is world
    assert (world.rank(), world.size(), world.included()) == (hvd.rank(), hvd.size(), True)
    hvd.shutdown()
    try:
        assert world.ranks is None
    finally:
        hvd.init()


def test_the_global_process_set_tells_its_ranks_while_there_is_a_world(ranks: Ranks) -> None:
    ranks.run(describe_the_world)


def describe_a_set(name: str) -> None:
    hvd = drivers.get(name).hvd
    last = hvd.add_process_set([hvd.size() - 1, 0])
    try:
        text = f"ProcessSet(process_set_id={last.process_set_id}, ranks=[0, {hvd.size() - 1}], mpi_comm=None)"
        assert str(last) == text
        copy = pickle.loads(pickle.dumps(last))
        assert (copy.ranks, copy.process_set_id) == (last.ranks, None)
    finally:
        hvd.remove_process_set(last)


def test_a_process_set_prints_as_horovods(ranks: Ranks) -> None:
    ranks.run(describe_a_set)


def test_ranks_of_a_process_set_are_integers() -> None:
    for given in (["0"], [0, "a"], [0, 0.5], [None], 3, None):
        with pytest.raises(ValueError, match="expected a list of ranks"):
            polyhvd.ProcessSet(given)
    ranks = polyhvd.ProcessSet(np.array([2, 0, 2])).ranks
    assert ranks == [0, 2]
    assert all(type(rank) is int for rank in ranks)


def begin_with_the_same_set_twice(name: str) -> None:
    hvd = drivers.get(name).hvd
    size = hvd.size()
    hvd.shutdown()
    try:
        with pytest.raises(ValueError, match=r"ranks \[0\] are given as two process sets"):
            hvd.init(process_sets=[first := hvd.ProcessSet([0]), second := hvd.ProcessSet([0])])
        assert hvd.is_initialized()
        assert (hvd.size(), first.process_set_id, second.process_set_id) == (size, 1, None)
        hvd.shutdown()
        only = hvd.ProcessSet([0])
        hvd.init(process_sets=[only])
        assert only.process_set_id == 1
        with pytest.raises(ValueError, match="already"):
            hvd.add_process_set([0])
    finally:
        hvd.shutdown()
        hvd.init()


def test_the_same_ranks_as_two_process_sets_are_refused(ranks: Ranks) -> None:
    ranks.run(begin_with_the_same_set_twice)
