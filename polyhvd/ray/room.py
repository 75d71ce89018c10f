"""Where the processes of an elastic job have room: on nodes of Ray, or in a placement group."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from numbers import Integral
from typing import Any, Protocol

import ray
from ray._private import state, worker
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from polyhvd.launch.elastic.discovery import HostDiscovery
from polyhvd.ray.raylet import kill

__all__ = ["ANY", "Demand", "GroupRoom", "KnownHosts", "NodeRoom", "RayHostDiscovery", "Room", "Watched"]

#: The bundle of processes that are in no placement group.
ANY = -1
_ROUNDING = 1e-6  # 0.3 CPUs are enough for three ranks with 0.1
#: In which Ray notices that the resources of a group that was removed are free.
_SETTLE_S = 3.0

#: How many processes have their resources, by the id of the node and the bundle.
Held = Counter[tuple[str, int]]


class Room(Protocol):
    """The places in which a job may start processes."""

    name: str  #: for messages

    def available(self, held: Held) -> dict[str, int]:
        """How many processes each node can have, by the node's id, with those that the job has there."""

    def strategy(self, node: str, held: Held) -> Any:
        """Ray's scheduling strategy for one more process on a node."""

    def resources(self) -> str:
        """The resources that it has, for messages."""


class RayHostDiscovery:
    """Lists the nodes of Ray with the number of ranks for which each has resources, used or not.

    Nodes are named by Ray's ids: those of a test cluster share one address.

    Args:
        use_gpu: whether a rank needs GPUs.
        cpus_per_worker: CPUs of a rank.
        gpus_per_worker: GPUs of a rank.
        cpus_per_slot: another name of ``cpus_per_worker``, as in ``horovod.ray.elastic``.
        gpus_per_slot: another name of ``gpus_per_worker``.

    Example::

        RayHostDiscovery(use_gpu=True, gpus_per_worker=2).find_available_hosts_and_slots()
    """

    def __init__(
        self,
        use_gpu: bool = False,
        cpus_per_worker: float = 1,
        gpus_per_worker: float | None = 1,
        *,
        cpus_per_slot: float | None = None,
        gpus_per_slot: float | None = None,
    ) -> None:
        cpus = cpus_per_worker if cpus_per_slot is None else cpus_per_slot
        wanted = gpus_per_worker if gpus_per_slot is None else gpus_per_slot
        gpus = (1 if wanted is None else wanted) if use_gpu else 0
        self._needed = {name: n for name, n in (("CPU", cpus), ("GPU", gpus)) if n}

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The number of ranks that each node can have, by the node's id; without nodes that can have none."""
        nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        found = {node: _count(has, self._needed) for node, has in nodes.items()}
        return {node: slots for node, slots in found.items() if slots}


class KnownHosts:
    """Lists the hosts of a user's discovery that Ray has: an actor for another one would wait for ever.

    Args:
        discovery: the user's.
    """

    def __init__(self, discovery: HostDiscovery) -> None:
        self._discovery = discovery
        #: The others, by the ids or addresses that were not found.
        self.unknown: list[str] = []

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The number of ranks that each node can have, by its id or address.

        Raises:
            TypeError: the user's discovery has returned something else.
        """
        hosts = self._discovery.find_available_hosts_and_slots()
        if not isinstance(hosts, Mapping) or not all(isinstance(slots, Integral) for slots in hosts.values()):
            raise TypeError(
                f"settings.discovery: find_available_hosts_and_slots() has returned {hosts!r}; expected a "
                "dict from ids or addresses of nodes to numbers of ranks"
            )
        nodes = [node for node in ray.nodes() if node["Alive"]]
        names = {node[key] for node in nodes for key in ("NodeID", "NodeManagerAddress")}
        self.unknown = [host for host in hosts if host not in names]
        return {host: hosts[host] for host in hosts if host in names}


def _count(has: Mapping[str, float], needed: Mapping[str, float]) -> int:
    """Return for how many ranks these resources are enough."""
    return int(min(has.get(name, 0) / amount + _ROUNDING for name, amount in needed.items()))


class NodeRoom:
    """The nodes of the cluster.

    Args:
        discovery: counts the ranks for which nodes have resources.
        needed: the resources of a rank.
    """

    name = "the cluster"

    def __init__(self, discovery: RayHostDiscovery, needed: Mapping[str, float]) -> None:
        self._discovery, self._needed = discovery, needed

    def available(self, held: Held) -> dict[str, int]:
        """See Room."""
        own: Counter[str] = Counter()
        for (node, _), count in held.items():
            own[node] += count
        free = {node: _count(has, self._needed) for node, has in state.available_resources_per_node().items()}
        found = {
            node: min(slots, own[node] + free.get(node, 0))
            for node, slots in self._discovery.find_available_hosts_and_slots().items()
        }
        return {node: slots for node, slots in found.items() if slots}

    def strategy(self, node: str, held: Held) -> Any:
        """See Room."""
        return NodeAffinitySchedulingStrategy(node, soft=False)

    def resources(self) -> str:
        """See Room."""
        return f"Free: {ray.available_resources()}"


class GroupRoom:
    """The bundles of a placement group.

    Args:
        group: the placement group.
        needed: the resources of a rank.
    """

    name = "the current placement group"

    def __init__(self, group: Any, needed: Mapping[str, float]) -> None:
        self._group, self._needed = group, needed
        #: Resources of this process, with the names of bundles. Ray subtracts them only later.
        self._own: dict[str, float] = {
            name: sum(amount for _, amount in parts)
            for name, parts in worker.global_worker.core_worker.resource_ids().items()
        }
        self._bundles: dict[str, dict[int, int]] = {}  # of each node, with the ranks that each can have

    def available(self, held: Held) -> dict[str, int]:
        """See Room."""
        table = placement_group_table(self._group)
        free = state.available_resources_per_node()
        found: dict[str, dict[int, int]] = {}
        for number, node in table["bundles_to_node_id"].items():
            if node not in free:
                continue  # not placed, or lost: Ray places it again
            suffix = f"_group_{number}_{self._group.id.hex()}"
            needed = {name + suffix: amount for name, amount in self._needed.items()}
            total = table["bundles"][number]
            has = {name + suffix: amount - self._own.get(name + suffix, 0) for name, amount in total.items()}
            slots = min(_count(has, needed), held[node, number] + _count(free[node], needed))
            found.setdefault(node, {})[number] = slots
        self._bundles = found
        counts = {node: sum(bundles.values()) for node, bundles in found.items()}
        return {node: count for node, count in counts.items() if count}

    def strategy(self, node: str, held: Held) -> Any:
        """See Room."""
        bundles = self._bundles.get(node, {ANY: 0})
        bundle = max(bundles, key=lambda number: bundles[number] - held[node, number])
        return PlacementGroupSchedulingStrategy(self._group, bundle)

    def resources(self) -> str:
        """See Room."""
        return f"Its bundles: {self._group.bundle_specs}"


class Demand:
    """Shows Ray's autoscaler the ranks for which a job has no room, as placement groups that wait.

    Groups that Ray could place are removed, and the job uses what they
    had. Ray removes all of them when the driver ends, however it ends. A request by
    ``ray.autoscaler.sdk.request_resources`` would stay, and replace that of another job.

    Args:
        bundle: the resources of a rank.
    """

    def __init__(self, bundle: Mapping[str, float]) -> None:
        self._bundle = dict(bundle)
        self._groups: list[Any] = []
        self._quiet_until = 0.0
        self._is_closed = False
        self._lock = threading.Lock()

    def show(self, missing: int) -> None:
        """Have groups for so many ranks wait, each of which Ray may place."""
        with self._lock:
            if self._is_closed:
                return
            now = time.monotonic()
            if any(group.wait(0) for group in self._groups):
                self._remove(self._groups)
                self._quiet_until = now + _SETTLE_S  # Ray would give the next groups what these had
            if now < self._quiet_until:
                missing = 0
            self._remove(self._groups[max(0, missing) :])
            while len(self._groups) < missing:
                self._groups.append(placement_group([self._bundle]))

    def show_whole(self, count: int) -> None:
        """Have one group for so many ranks wait, which Ray places whole or not at all."""
        with self._lock:
            if any(group.wait(0) for group in self._groups):
                self._remove(self._groups)
                self._quiet_until = time.monotonic() + _SETTLE_S
            if not self._groups and time.monotonic() >= self._quiet_until:
                self._groups.append(placement_group([self._bundle] * count))

    def pause(self) -> None:
        """An actor is to get resources that are about to be free: no group may get them. From any thread."""
        self._quiet_until = time.monotonic() + _SETTLE_S

    def close(self) -> None:
        """Remove all groups. Does not wait for a GCS that is gone, as Ray does until it ends this process."""
        kill((), self._close)

    def _close(self) -> None:
        with self._lock:
            self._is_closed = True
            self._remove(self._groups)

    def _remove(self, groups: list[Any]) -> None:
        for group in list(groups):
            if ray.is_initialized():
                with contextlib.suppress(Exception):  # the end of the driver removes it as well
                    remove_placement_group(group)
            self._groups.remove(group)


class Watched:
    """The discovery of one job: where it has room, without nodes that are drained.

    Args:
        room: where.
        held: what the job has.
        leave: called with each node that Ray is draining and that has processes of the job.
        demand: asks for room; None: nothing does.
    """

    def __init__(
        self, room: Room, held: Callable[[], Held], leave: Callable[[str], None], demand: Demand | None
    ) -> None:
        self._room, self._held, self._leave, self._demand = room, held, leave, demand
        self._draining: frozenset[str] = frozenset()
        #: Number of processes that the job would have if there was room.
        self.wanted = 0

    def find_available_hosts_and_slots(self) -> dict[str, int]:
        """The nodes with the number of processes that the job can have on each."""
        draining = frozenset(state.state.get_draining_nodes())
        held = self._held()
        for node in {node for node, _ in held} & (draining - self._draining):
            self._leave(node)  # and only from the next time on it is missing in the list
        found = self._room.available(held)
        hosts = {node: slots for node, slots in found.items() if node not in self._draining & draining}
        self._draining = draining
        if self._demand is not None:
            self._demand.show(self.wanted - sum(hosts.values()))
        return hosts
