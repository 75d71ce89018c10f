"""What :class:`polyhvd.elastic.membership.Membership` knows of processes, slots, hosts and worlds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from polyhvd.elastic.limits import Limits

__all__ = ["Member", "Rest", "Slot", "Standing", "World"]


@dataclass
class Member:
    """A process. See :mod:`polyhvd.elastic.membership`."""

    host: str
    slot: int
    since: float
    generation: int = 0  # of the last world that it was given a place in
    asks: bool = False  # for a place in a later one
    ready_at: float = 0.0  # when it has asked for its last
    dismissed: bool = False
    leaving: bool = False  # with notice: it is in no further world
    left: tuple[int, ...] = ()  # see Membership.world_left_by; set when it is dismissed from that world
    commit: tuple[int, int] = (0, -1)  # its last one: number of the call, and of the commit in that call
    #: When it got its first place, beside members that were in an elastic function already; None: it did not,
    #: or has come to its own since.
    joins_since: float | None = None
    is_founder: bool = False  # it was in the first world, or the first after a lost state: it has the state
    dying: bool = False  # others of its world have seen it dead; what it has died of is yet to be told


@dataclass
class Slot:
    """A place for a process on a host."""

    failures: int = 0
    free_at: float = 0.0
    done: bool = False  # its process has ended in good order: there is no more to do
    left: bool = False  # with notice: free only where fewer than wanted would be left
    why: str = ""  # it has failed or was left, for messages

    def leave(self, why: str) -> None:
        """Keep it empty, unless fewer than wanted would be left."""
        self.left, self.why = True, why


@dataclass
class Rest:
    """Of a host that could not take part."""

    refusals: int = 0  # in a row
    until: float = 0.0
    why: str = ""  # for messages


@dataclass
class World:
    """The last generation that was formed."""

    generation: int
    members: list[int]  # those that live, by rank
    since: float
    lost: list[int] = field(default_factory=list)
    notified: bool = False
    wired: bool = False  # somebody has seen all of it connected
    progressed: bool = False  # somebody has committed in it
    failed: bool = False  # a collective has failed in it, though no member may be lost
    killed: bool = False  # a member was killed from outside
    #: Members that have ended, or were given up, before they came to their elastic function.
    early: list[int] = field(default_factory=list)
    struck: list[tuple[Slot, float]] = field(default_factory=list)  # slots of those, and when
    judged: bool = False  # whether its failure was counted


@dataclass(frozen=True)
class Standing:
    """All that a membership knows at one time. The containers are its own, and are only to be read."""

    now: float
    limits: Limits
    hosts: Mapping[str, int]  #: that may be used, with their slots
    left: Set[str]  #: hosts that have given notice
    slots: Mapping[tuple[str, int], Slot]
    rests: Mapping[str, Rest]
    members: Mapping[int, Member]
    world: World | None
    next_world: Sequence[int]  #: its members, if it were formed now
    late: Sequence[int]  #: members that have not asked, and that the next world has to wait for
    least: int  #: members that make a world
    over: bool
    leaving: bool  #: everybody leaves with notice
    finishing: bool  #: some of the world are done
    parting: str  #: why everybody leaves; empty: not for a shortage
    too_few_since: float | None

    @cached_property
    def ranks(self) -> dict[int, int]:
        """The rank of each member of the world."""
        return {} if self.world is None else {number: i for i, number in enumerate(self.world.members)}
