"""In reproducible mode the bits of a sum are those of the ranks' order, wherever the ranks are."""

from __future__ import annotations

import os
from typing import Any

import collectives
import numpy as np
import oracle
import polyhvd.numpy as hvd
import pytest
from pool import Pools, PoolSpec

ON = ("POLYHVD_REPRODUCIBLE", "1")
TCP = ("POLYHVD_SHARED_MEMORY", "0")
LAYOUTS = {
    3: (((3,), ()), ((1, 2), ()), ((1, 1, 1), ()), ((3,), (TCP,))),
    4: (((4,), ()), ((2, 2), ()), ((3, 1), ()), ((1, 1, 1, 1), ()), ((4,), (TCP,))),
}


def shuffled_sums() -> dict[str, int]:
    """Cancelling terms among other operations, in another order and other groups on each layout."""
    size, rank = hvd.size(), hvd.rank()
    digests = collectives.same_bits("numpy", 1)
    random = np.random.default_rng(size)
    for length in (3, 5000, 1_500_001):
        exponents = random.integers(-30, 30, length)
        terms = [np.ldexp(random.standard_normal(length), exponents).astype(np.float32) for _ in range(size)]
        expected = oracle.reduce("Sum", terms)
        for name in ("blocking", "grouped", "scattered"):
            if name == "blocking":
                result = hvd.allreduce(terms[rank], name=name, op=hvd.Sum)
            elif name == "grouped":
                result = hvd.grouped_allreduce([terms[rank][:2], terms[rank]], name=name, op=hvd.Sum)[1]
            else:
                result = hvd.allgather(
                    hvd.reducescatter(terms[rank], name=name, op=hvd.Sum), name=name + " g"
                )
            oracle.check(f"{name} {length}", result, expected, exact=True)
            digests[f"{name} {length}"] = oracle.digest(result)
        digests[f"Adasum {length}"] = oracle.digest(hvd.allreduce(terms[rank], name="adasum", op=hvd.Adasum))
    return digests


@pytest.mark.parametrize("size", LAYOUTS)
def test_neither_hosts_nor_transport_show_in_the_bits(pools: Pools, size: int) -> None:
    found: dict[Any, dict[str, int]] = {}
    for hosts, settings in LAYOUTS[size]:
        for rank, digests in enumerate(
            pools.get(PoolSpec("numpy", hosts, (ON, *settings))).run(shuffled_sums)
        ):
            found[hosts, settings, rank] = digests
    first, *others = found.values()
    for other in others:
        assert other == first


def init_otherwise() -> None:
    hvd.shutdown()
    with pytest.raises(hvd.RankMismatchError, match="reproducible must be the same on all ranks"):
        hvd.init(reproducible=os.environ["POLYHVD_RANK"] == "0")
    hvd.init()


def test_ranks_that_differ_in_the_mode_are_told(pools: Pools) -> None:
    pools.get(PoolSpec("numpy", (2,))).run(init_otherwise)
