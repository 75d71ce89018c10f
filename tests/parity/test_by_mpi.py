"""Under MPI's launcher, with MPI as the backend, the tensors of every framework go through MPI."""

from __future__ import annotations

import collectives
import drivers
import exchange
import pytest
from worlds import Ranks

from polyhvd.collectives.adapter import Capability

pytestmark = [pytest.mark.slow, pytest.mark.only_by_mpi, pytest.mark.sizes(2, 3, 4)]


def test_tensors_go_through_mpi(ranks: Ranks) -> None:
    before = ranks.run(drivers.counters)
    ranks.run_alike(collectives.allreduce, "Sum")
    for rank, (was, now) in enumerate(zip(before, ranks.run(drivers.counters), strict=True)):
        assert now["mpi_bytes"] > was["mpi_bytes"], (rank, was, now)
        assert now["shm_bytes"] == was["shm_bytes"], (rank, was, now)


def test_rows_of_every_kind_go_through_mpi(ranks: Ranks) -> None:
    ranks.run_alike(collectives.allgather, "growing")
    ranks.run_alike(collectives.broadcast)
    ranks.run(exchange.alltoall, "uneven", True)
    ranks.run(exchange.reducescatter, "Sum")
    ranks.run(exchange.grouped)


def test_much_in_flight_goes_through_mpi(ranks: Ranks) -> None:
    ranks.needs(Capability.ASYNC)
    ranks.run_alike(collectives.allreduce_async, "Sum", False)
    ranks.run(exchange.everything_in_flight)


def test_ranks_without_data_stand_in_and_process_sets_come_and_go(ranks: Ranks) -> None:
    ranks.run(exchange.join)
    ranks.run(exchange.process_sets)
