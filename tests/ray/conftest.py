"""One cluster of Ray for all tests of this folder, with two nodes on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from polyhvd.installed import is_installed

collect_ignore_glob = [] if is_installed("ray") else ["test_*.py"]

#: Ray gives a node 30 s to start, which a busy machine exceeds.
TRIES = 4
#: Of each node; Ray's default for such clusters is less than the images of Fashion-MNIST.
_STORE_BYTES = 1 << 29
#: A busy machine takes long to start Ray, and leaves next to nothing to its workers, which run with nice 15.
SETTINGS = {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_agent_register_timeout_ms": "120000",
    "RAY_worker_niceness": "0",
}


@pytest.fixture(scope="session", autouse=True)
def ray_cluster() -> Iterator[Any]:
    """A cluster to which this process is connected: two nodes with 6 CPUs, one with 2 GPUs."""
    os.environ.update(SETTINGS)
    import ray
    from ray.cluster_utils import Cluster

    made = Cluster()
    try:
        for gpus in (2, 0):
            for tries_left in range(TRIES)[::-1]:
                try:
                    made.add_node(num_cpus=6, num_gpus=gpus, object_store_memory=_STORE_BYTES)
                    break
                except Exception:
                    if not tries_left:
                        raise
        ray.init(address=made.address, log_to_driver=False)
        yield made
        ray.shutdown()
    finally:
        made.shutdown()


@pytest.fixture
def cluster(ray_cluster: Any) -> str:
    """The address of the cluster."""
    address: str = ray_cluster.address
    return address
