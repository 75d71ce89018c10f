"""How actors of Ray become the ranks of a job: where each of them is, and what it is given.

The secret travels as an argument of a call. It is in no environment and in no log.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray.experimental.internal_kv import _internal_kv_put

from polyhvd import __version__
from polyhvd.launch.entry import last_generation
from polyhvd.launch.init import is_initialized
from polyhvd.launch.providers.precedence import RAY
from polyhvd.launch.providers.ray import RANKED, Assignment
from polyhvd.ray import metrics
from polyhvd.ray.raylet import end_with_raylet
from polyhvd.rendezvous.auth import new_secret
from polyhvd.runtime.placement import by_host, placements, visible_gpus

__all__ = ["Location", "Submit", "by_node", "check_versions", "join", "locate", "rendezvous", "version"]


class Submit(Protocol):
    """Calls a function in one of several processes of Ray, and returns a reference to its result."""

    def __call__(self, number: int, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Submit ``function(*arguments)`` to the process of this number."""


@dataclass(frozen=True)
class Location:
    """The location of a process of Ray.

    Args:
        node: Ray's id of the node. Nodes of a test cluster share one address.
        address: of the node.
        gpus: ids of the GPUs that Ray has assigned to the process.
        version: of polyhvd and Python, see :func:`version`.
        generation: of the last world that the process was in.
        is_initialized: whether it is in one now.
    """

    node: str
    address: str
    gpus: tuple[str, ...]
    version: str
    generation: int
    is_initialized: bool


def rendezvous(actors: Sequence[Any], *, timeout_s: float = 30.0) -> list[Any]:
    """Make actors the ranks of one job, so that ``hvd.init()`` inside each of them connects to the others.

    Actors of one node get consecutive ranks, the nodes in the order of their first actors. The place of an
    actor stays its own until the next call, over ``shutdown()`` and ``init()``. In an actor that Ray has
    restarted since, ``init()`` raises :class:`polyhvd.config.ConfigError`.

    Args:
        actors: handles of running actors of any class.
        timeout_s: seconds for all actors to answer, once they are running.

    Returns:
        The actors in rank order.

    Raises:
        ValueError: there are no actors, or one is given twice.
        RuntimeError: an actor is in a world; call ``hvd.shutdown()`` in it first. Or it has another version
            of polyhvd or Python than this process.
        TimeoutError: actors have not answered in time: they are not running, or busy.
        RayActorError: an actor is dead.

    Example::

        actors = polyhvd.ray.rendezvous([Trainer.remote() for _ in range(4)])
        ray.get([actor.train.remote() for actor in actors])  # train() calls hvd.init()
    """
    handles = list(actors)
    if not handles or len(set(handles)) < len(handles):
        raise ValueError(f"rendezvous(): expected different actors; found {handles}")

    def submit(number: int, function: Callable[..., Any], /, *arguments: Any) -> Any:
        return handles[number].__ray_call__.remote(_call, function, *arguments)

    deadline = time.monotonic() + timeout_s
    found = locate(submit, len(handles), deadline)
    _results([submit(number, _record) for number in range(len(handles))], deadline)
    order = by_node(found)
    ranked = [handles[number] for number in order]

    def submit_to_rank(rank: int, function: Callable[..., Any], /, *arguments: Any) -> Any:
        return submit(order[rank], function, *arguments)

    join(submit_to_rank, [found[number] for number in order], deadline)
    return ranked


def locate(submit: Submit, count: int, deadline: float) -> list[Location]:
    """Find out where processes run; raises what :func:`rendezvous` does, but for ValueError."""
    found: list[Location] = _results([submit(number, _here) for number in range(count)], deadline)
    busy = [number for number, location in enumerate(found) if location.is_initialized]
    if busy:
        raise RuntimeError(f"actors {busy} are in a world already; call hvd.shutdown() in each of them first")
    check_versions({f"actor {number}": (at.node, at.version) for number, at in enumerate(found)})
    return found


def check_versions(versions: Mapping[str, tuple[str, str]]) -> None:
    """Raise RuntimeError if a process of Ray has another version of polyhvd or Python than this one.

    Args:
        versions: of each process, after its node; by what messages call the process.
    """
    mine = version()
    for process, (node, its) in versions.items():
        if its != mine:
            raise RuntimeError(
                f"{process} on node {node} has {its}, and this process {mine}; install the same versions "
                "on all nodes"
            )


def version() -> str:
    """The versions of polyhvd and Python in this process: functions are sent as code of one Python."""
    python = ".".join(platform.python_version_tuple()[:2])
    return f"polyhvd {__version__} on Python {python}"


def join(
    submit: Submit,
    locations: Sequence[Location],
    deadline: float,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Give each process its place in a new job.

    Args:
        submit: calls a function on a rank.
        locations: of the ranks.
        deadline: by ``time.monotonic()``.
        variables: to set in the environment of each process.

    Raises:
        TimeoutError: ranks have not answered in time.
        RayActorError: one is dead.
    """
    secret = new_secret()
    (endpoint,) = _results([submit(0, _serve, secret, locations[0].address, variables or {})], deadline)
    generation = max(location.generation for location in locations)
    nodes = [location.node for location in locations]
    places = placements(nodes, generation)
    calls = []
    for rank, place in enumerate(places):
        visible = visible_gpus([location.gpus for location in locations], nodes, place.host)
        given = {**({"CUDA_VISIBLE_DEVICES": ",".join(visible)} if visible else {}), **(variables or {})}
        calls.append(submit(rank, _join, Assignment(place, endpoint, secret), given))
    _results(calls, deadline)


def by_node(locations: Sequence[Location], first: str = "") -> list[int]:
    """Numbers of processes in the order in which they become ranks, node by node.

    Args:
        locations: of the processes.
        first: id of a node that comes before the others.
    """
    order = by_host([location.node for location in locations])
    return sorted(order, key=lambda number: locations[number].node != first)


def _results(calls: list[Any], deadline: float) -> list[Any]:
    left_s = max(0.0, deadline - time.monotonic())
    _, pending = ray.wait(calls, num_returns=len(calls), timeout=left_s)
    if pending:
        late = [number for number, call in enumerate(calls) if call in pending]
        raise TimeoutError(
            f"actors {late} (of {len(calls)}) have not answered in time: they are not running yet, or busy "
            "with another call"
        )
    found: list[Any] = ray.get(calls)
    return found


# In the processes of the ranks --------------------------------------------------


def _call(actor: object, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(*arguments)


def _record() -> None:
    """Record that this actor is a rank, for its next process if Ray restarts it."""
    _internal_kv_put(ray.get_runtime_context().get_actor_id(), b"", namespace=RANKED)


def _here() -> Location:
    context = ray.get_runtime_context()
    return Location(
        node=context.get_node_id(),
        address=ray.util.get_node_ip_address(),
        gpus=tuple(context.get_accelerator_ids().get("GPU", ())),
        version=version(),
        generation=last_generation(),
        is_initialized=is_initialized(),
    )


def _serve(secret: str, address: str, variables: Mapping[str, str]) -> str:
    RAY.set_variables(variables)  # with the interface
    return RAY.serve(secret, address)


def _join(assignment: Assignment, variables: dict[str, str]) -> None:
    RAY.set_variables(variables)
    RAY.give(assignment)
    end_with_raylet()
    metrics.publish()
