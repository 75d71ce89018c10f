"""The records of :class:`polyhvd.elastic.membership.Membership`: processes, slots, hosts and worlds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

from polyhvd.elastic.limits import Limits

__all__ = ["Cooldown", "FormedWorld", "Member", "Slot", "Standing"]


@dataclass
class Member:
    """A process. See :mod:`polyhvd.elastic.membership`."""

    host: str
    slot: int
    since: float
    generation: int = 0  # of the last world that it was given a place in
    waiting: bool = False  # it has requested a place in a later one
    ready_at: float = 0.0  # when it last requested a place
    dismissed: bool = False
    leaving: bool = False  # with notice: it is in no further world
    departed_world: tuple[int, ...] = ()  # see Membership.departed_world; set when it is dismissed
    commit: tuple[int, int] = (0, -1)  # its last commit: number of the call, and of the commit in that call
    #: When it got its first place in a world whose members were in an elastic function already; None: it did
    #: not, or has called its own since.
    joins_since: float | None = None
    is_founder: bool = False  # it was in the first world, or the first after a lost state: it has the state
    dying: bool = False  # other ranks have seen it dead; its agent has not reported it yet


@dataclass
class Slot:
    """A place for a process on a host."""

    failures: int = 0
    free_at: float = 0.0
    done: bool = False  # its process has finished the program
    vacated: bool = False  # used again only if there are too few processes without it
    why: str = ""  # why it has failed or is vacated, for messages

    def vacate(self, why: str) -> None:
        """Keep it empty, unless there are too few processes without it."""
        self.vacated, self.why = True, why


@dataclass
class Cooldown:
    """The wait after which a host that could not take part is tried again."""

    refusals: int = 0  # in a row
    until: float = 0.0
    why: str = ""  # for messages


@dataclass
class FormedWorld:
    """The last generation that was formed."""

    generation: int
    members: list[int]  # those that live, by rank
    since: float
    lost: list[int] = field(default_factory=list)
    notified: bool = False
    connected: bool = False  # a member has reported that all ranks were connected
    progressed: bool = False  # a member has committed in it
    failed: bool = False  # a collective has failed in it, perhaps without the loss of a member
    killed: bool = False  # a member was killed from outside
    #: Members that have ended, or were given up, before they called their elastic function.
    early: list[int] = field(default_factory=list)
    killed_slots: list[tuple[Slot, float]] = field(default_factory=list)  # killed from outside, and when
    judged: bool = False  # whether its failure was counted


@dataclass(frozen=True)
class Standing:
    """A view of a membership at one time. Its containers are the membership's and must not be changed."""

    now: float
    limits: Limits
    hosts: Mapping[str, int]  #: that may be used, with their slots
    departed_hosts: Set[str]  #: hosts that have given notice
    slots: Mapping[tuple[str, int], Slot]
    cooldowns: Mapping[str, Cooldown]
    members: Mapping[int, Member]
    world: FormedWorld | None
    next_world: Sequence[int]  #: its members if it was formed now
    late: Sequence[int]  #: members whose place requests the next world has to wait for
    least: int  #: minimum number of members of a world
    over: bool
    leaving: bool  #: all members leave with notice
    finishing: bool  #: some of the world are done
    parting: str  #: why all members leave; empty: not for a shortage
    too_few_since: float | None

    @cached_property
    def ranks(self) -> dict[int, int]:
        """The rank of each member of the world."""
        return {} if self.world is None else {number: i for i, number in enumerate(self.world.members)}
