"""Jobs that write flight dumps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fork_servers import ForkServers
from pool import Pool, Pools, PoolSpec


@pytest.fixture
def start(pools: Pools, fork_servers: ForkServers, tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    """Starts a pool of this test alone, whose dumps go to tmp_path."""
    pools.close()
    started: list[Pool] = []

    def start(ranks: int, **settings: str) -> Pool:
        values = {"POLYHVD_FLIGHT_DIR": str(tmp_path), **settings}
        started.append(Pool(PoolSpec("numpy", (ranks,), tuple(values.items())), fork_servers))
        return started[-1]

    yield start
    for pool in started:
        pool.kill()
