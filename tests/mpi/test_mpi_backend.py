"""The MPI backend beside the suites that it shares: reproducible sums, and a choice of operations."""

from __future__ import annotations

import collectives
import drivers
import exchange
import mpirun
import test_conformance
from pool import Pools, PoolSpec
from worlds import assert_alike

_MPI = (*mpirun.AS_ROOT, ("POLYHVD_BACKENDS", "mpi"))


def test_reproducible_sums_have_the_bits_of_the_host_backend(pools: Pools) -> None:
    """MPI moves the bytes, our kernels add in the order of ranks, whatever the order of submission."""
    settings = (*_MPI, ("POLYHVD_REPRODUCIBLE", "1"))
    pool = pools.get(PoolSpec("numpy", (3,), settings, mpirun=mpirun.command()))
    assert_alike(pool.run(collectives.same_bits, "numpy", 1, [1, 1, 1]))
    assert_alike(pool.run(collectives.special_values, "numpy"))
    pool.run(exchange.reducescatter, "numpy", "Sum")
    pool.run(exchange.alltoall, "numpy", "uneven", True)
    pool.run(exchange.adasum, "numpy")
    counters = pool.run(drivers.counters, "numpy")
    assert all(item["mpi_bytes"] > 0 and item["shm_bytes"] == 0 for item in counters), counters


def test_a_backend_may_be_chosen_for_some_operations(pools: Pools) -> None:
    settings = (*mpirun.AS_ROOT, ("POLYHVD_BACKENDS", "mpi:allreduce+broadcast"))
    pool = pools.get(PoolSpec("numpy", (2,), settings, mpirun=mpirun.command()))
    for kind, by_mpi in (("allreduce", True), ("allgather", False), ("broadcast", True)):
        grown = pool.run(test_conformance.count_bytes, kind, 1000)
        total = {name: sum(item[name] for item in grown) for name in ("mpi_bytes", "shm_bytes")}
        assert (total["mpi_bytes"] > 0, total["shm_bytes"] > 0) == (by_mpi, not by_mpi), (kind, total)
