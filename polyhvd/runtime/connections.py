"""The connections of a rank to the others: descriptors, ready to use and already authenticated.

Made by :mod:`polyhvd.runtime.bootstrap`, consumed by ``_core.Engine``, which takes the descriptors over.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polyhvd.rendezvous.auth import SessionKeys

__all__ = ["TREE_RADIX", "Connections", "tree_parent"]

TREE_RADIX = 4


def tree_parent(domain: int) -> int:
    """Parent of a domain in the control tree over domains; -1 for the root, domain 0."""
    return (domain - 1) // TREE_RADIX if domain else -1


@dataclass
class Connections:
    """A *domain* is a group of ranks that share a memory segment: a host, or a single rank.

    Domains are ordered by their first rank, and ranks within a domain ascend. The first rank of a
    domain leads it: only it has control connections to other domains (``tree_parent``).
    """

    rank: int = 0
    size: int = 1
    domains: list[list[int]] = field(default_factory=lambda: [[0]])
    #: Text per rank for messages, such as "pid 812 on algo-2".
    labels: list[str] = field(default_factory=lambda: ["this process"])
    #: Host of each rank, as the launcher numbers them.
    hosts: list[str] = field(default_factory=lambda: ["0"])
    #: Process id of each rank that is on this host and belongs to the same user; 0 of others.
    pids: list[int] = field(default_factory=lambda: [0])
    #: Sealed memfd of the own domain, of _core.segment_bytes(len(domain)) bytes, zeroed; -1: none.
    segment_fd: int = -1
    #: Connected Unix stream sockets to the other ranks of the own domain, by world rank.
    local_fds: dict[int, int] = field(default_factory=dict)
    #: Connected TCP sockets to the leaders of the parent and child domains, by world rank.
    control_fds: dict[int, int] = field(default_factory=dict)
    #: Connected TCP sockets to every rank outside the own domain, by world rank.
    data_fds: dict[int, int] = field(default_factory=dict)
    #: With what messages on these connections are signed, by world rank.
    control_keys: dict[int, SessionKeys] = field(default_factory=dict)
    data_keys: dict[int, SessionKeys] = field(default_factory=dict)
    #: Only of this world; all its ranks have it, and sign with it what concerns more than two of them.
    world_key: bytes = field(default=b"", repr=False)
    #: Whether a rank that dies is given up before its process has ended: where others go on without it. Where
    #: its end is the end of the job, the launcher is to see it before the ends that follow from it.
    watches_deaths: bool = False
    #: Sorted world ranks of the static process sets 1, 2, ...
    process_sets: list[list[int]] = field(default_factory=list)
