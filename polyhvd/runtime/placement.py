"""Where one rank is in a world: the result of meeting the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ONE_RANK", "RANKS_MAX", "Placement", "by_host", "placements", "visible_gpus"]

#: More than any job has; a larger number is a mistake, and lists of so many ranks would take all memory.
RANKS_MAX = 1 << 20


@dataclass(frozen=True)
class Placement:
    """One rank's place in one generation of the world.

    Raises:
        ValueError: a rank is not below its size, or the world is larger than RANKS_MAX.
    """

    #: Which world this is, of those that follow one another in a job; from 1, the same on all its ranks.
    generation: int = 1
    rank: int = 0
    size: int = 1
    #: Among the ranks of this host.
    local_rank: int = 0
    local_size: int = 1
    #: Position of this host among those that have this local rank.
    cross_rank: int = 0
    cross_size: int = 1
    #: What the launcher calls the host. Ranks with the same one try shared memory.
    host: str = "0"

    def __post_init__(self) -> None:
        for rank, size, what in (
            (self.rank, self.size, "RANK"),
            (self.local_rank, self.local_size, "LOCAL_RANK"),
            (self.cross_rank, self.cross_size, "CROSS_RANK"),
        ):
            if not 0 <= rank < size:
                sized = what.replace("RANK", "SIZE")
                raise ValueError(f"POLYHVD_{what}={rank} is not below POLYHVD_{sized}={size}")

        if self.size > RANKS_MAX:
            raise ValueError(f"POLYHVD_SIZE={self.size}: at most {RANKS_MAX} ranks are supported")

    def values(self) -> dict[str, int]:
        """The place that launchers pass to a rank, by the names of variables without their prefix."""
        return {
            "RANK": self.rank,
            "SIZE": self.size,
            "LOCAL_RANK": self.local_rank,
            "LOCAL_SIZE": self.local_size,
            "CROSS_RANK": self.cross_rank,
            "CROSS_SIZE": self.cross_size,
        }


#: A world of one rank.
ONE_RANK = Placement()


def placements(hosts: Sequence[str], generation: int = 1) -> list[Placement]:
    """The places of ranks 0, 1, ... of which it is known on which host each one is.

    Example::

        placements(["a", "a", "b"])[2].local_rank  # 0
    """
    on_host: Counter[str] = Counter()
    at_position: Counter[int] = Counter()
    places = []
    for host in hosts:
        places.append((on_host[host], at_position[on_host[host]]))
        at_position[on_host[host]] += 1
        on_host[host] += 1
    return [
        Placement(
            generation=generation,
            rank=rank,
            size=len(hosts),
            local_rank=local_rank,
            local_size=on_host[host],
            cross_rank=cross_rank,
            cross_size=at_position[local_rank],
            host=host,
        )
        for rank, (host, (local_rank, cross_rank)) in enumerate(zip(hosts, places, strict=True))
    ]


def by_host(hosts: Sequence[str]) -> list[int]:
    """Numbers of processes in an order in which they can become ranks: those of a host are consecutive.

    Args:
        hosts: of each process.

    Example::

        by_host(["a", "b", "a"])  # [0, 2, 1]
    """
    first = {host: number for number, host in reversed(list(enumerate(hosts)))}
    return sorted(range(len(hosts)), key=lambda number: first[hosts[number]])


def visible_gpus(gpus: Sequence[Sequence[str]], hosts: Sequence[str], host: str) -> list[str]:
    """All GPUs of a job's ranks on a host, in the order of local ranks; programs choose by local_rank().

    Args:
        gpus: ids of those of each rank.
        hosts: of each rank.
        host: whose GPUs are wanted.
    """
    named = zip(gpus, hosts, strict=True)
    return list(dict.fromkeys(gpu for those, where in named if where == host for gpu in those))
