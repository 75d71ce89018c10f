"""Users' own actors as ranks."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
import pytest
import ray
import ray.cloudpickle
from ranks_alive import wait_until
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import polyhvd.ray
from polyhvd.config import ConfigError
from polyhvd.ray import BaseHorovodWorker

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


@ray.remote
class Trainer:
    def train(self, number: int, leave: bool = True) -> tuple[int, int, int, int, list[float]]:
        hvd.init()
        total = hvd.allreduce(np.full(2, 1.0 + number), op=hvd.Sum).tolist()
        found = hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_rank(), total
        if leave:
            hvd.shutdown()
        return found


def train(actors: list[Any], **options: Any) -> list[Any]:
    found: list[Any] = ray.get([actor.train.remote(i, **options) for i, actor in enumerate(actors)])
    return found


@pytest.fixture(scope="module")
def actors() -> list[Any]:
    """Three actors, of which the second is on another node than the others."""
    first, second = (node["NodeID"] for node in ray.nodes() if node["Alive"])
    strategies = [NodeAffinitySchedulingStrategy(node, soft=False) for node in (first, second, first)]
    return [Trainer.options(num_cpus=1, scheduling_strategy=strategy).remote() for strategy in strategies]


def test_own_actors_become_ranks_node_by_node(actors: list[Any]) -> None:
    ranked = polyhvd.ray.rendezvous(actors, timeout_s=60)
    assert ranked == [actors[0], actors[2], actors[1]]
    assert train(ranked) == [
        (0, 3, 0, 0, [6.0, 6.0]),
        (1, 3, 1, 0, [6.0, 6.0]),
        (2, 3, 0, 1, [6.0, 6.0]),
    ]


def test_actors_that_were_in_different_numbers_of_worlds_meet_again(actors: list[Any]) -> None:
    alone = polyhvd.ray.rendezvous(actors[:1])
    assert [train(alone)[0][1] for _ in range(2)] == [1, 1]
    ranked = polyhvd.ray.rendezvous(actors[::-1])
    assert ranked == [actors[2], actors[0], actors[1]]
    assert [found[:2] for found in train(ranked)] == [(0, 3), (1, 3), (2, 3)]


class Total:
    def __init__(self, start: float, *, factor: float) -> None:
        self.value = start * factor

    def add_up(self) -> list[float]:
        hvd.init()
        found = hvd.allreduce(np.full(1, self.value * (hvd.rank() + 1)), op=hvd.Sum).tolist()
        hvd.shutdown()
        return list(found)


def test_the_worker_of_horovod_keeps_an_object() -> None:
    workers = [ray.remote(BaseHorovodWorker).options(num_cpus=1).remote(0, 2) for _ in range(2)]
    workers = polyhvd.ray.rendezvous(workers, timeout_s=60)
    ray.get([worker.start_executable.remote(Total, [2.0], {"factor": 3.0}) for worker in workers])
    sums = ray.get([worker.execute.remote(lambda total: total.add_up()) for worker in workers])
    assert sums == [[18.0]] * 2
    worker = workers[0]
    ray.get(worker.update_env_vars.remote({"MINE": 7}))
    assert ray.get(worker.env_vars.remote())["MINE"] == "7"
    assert ray.get(worker.node_id.remote()) in {node["NodeID"] for node in ray.nodes()}
    assert ray.get(worker.hostname.remote()) == socket.gethostname()
    assert ray.get(worker.get_gpu_ids.remote()) == []


def test_the_same_actor_twice_is_refused(actors: list[Any]) -> None:
    with pytest.raises(ValueError, match="expected different actors"):
        polyhvd.ray.rendezvous([actors[0], actors[0]])


def test_actors_that_are_in_a_world_are_refused(actors: list[Any]) -> None:
    train(polyhvd.ray.rendezvous(actors[:2]), leave=False)
    with pytest.raises(RuntimeError, match=r"actors \[1, 2\] are in a world already"):
        polyhvd.ray.rendezvous([actors[2], actors[0], actors[1]])
    train(actors[:2])  # leaves


def test_an_actor_that_does_not_answer_is_named(actors: list[Any]) -> None:
    stuck = Trainer.options(num_cpus=1000).remote()
    with pytest.raises(TimeoutError, match=r"actors \[1\] \(of 2\) have not answered in time"):
        polyhvd.ray.rendezvous([actors[0], stuck], timeout_s=2)


def process_of(actor: Any) -> int | None:
    """Return the process of an actor; None: Ray is restarting it."""
    with contextlib.suppress(RayActorError):
        return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid())))
    return None


def test_an_actor_that_ray_has_restarted_is_no_rank_until_the_next_rendezvous() -> None:
    made = [Trainer.options(num_cpus=1, max_restarts=1).remote() for _ in range(2)]
    polyhvd.ray.rendezvous(made, timeout_s=60)
    former = process_of(made[1])
    ray.kill(made[1], no_restart=False)
    wait_until(lambda: process_of(made[1]) not in (None, former), "Ray restarts the actor", 60.0)
    with pytest.raises(ConfigError, match=r"Ray has restarted this actor .* and the new process has no rank"):
        ray.get(made[1].train.remote(1))
    assert [found[:2] for found in train(polyhvd.ray.rendezvous(made))] == [(0, 2), (1, 2)]
