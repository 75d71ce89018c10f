"""Below MPI's launcher, with MPI as the backend, the tensors of every framework go through MPI."""

from __future__ import annotations

import collectives
import drivers
import pytest
from worlds import Ranks


@pytest.mark.only_by_mpi
@pytest.mark.sizes(2, 3, 4)
def test_tensors_go_through_mpi(ranks: Ranks) -> None:
    before = ranks.run(drivers.counters)
    ranks.run_alike(collectives.allreduce, "Sum")
    for rank, (was, now) in enumerate(zip(before, ranks.run(drivers.counters), strict=True)):
        assert now["mpi_bytes"] > was["mpi_bytes"], (rank, was, now)
        assert now["shm_bytes"] == was["shm_bytes"], (rank, was, now)
