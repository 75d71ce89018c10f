"""What the members of an elastic job and its launcher tell each other through the job's store.

A member asks for a place, is answered when the next world is formed, and hears that its world is to come to
a boundary. Values of different generations never meet: each has scopes of its own.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from polyhvd.rendezvous.client import ConnectedStore
from polyhvd.rendezvous.store import GatherTimeoutError, StoreError
from polyhvd.runtime.placement import Placement, placements

__all__ = [
    "ASKS",
    "BEGINS",
    "GENERATIONS_MAX",
    "LEAVES",
    "PROGRESS",
    "SAYS",
    "STEPS",
    "Answer",
    "Question",
    "Seat",
    "lost_scope",
    "notice_scope",
    "place_scope",
    "places_scope",
    "slow_scope",
]

#: Scope in which members ask; the launcher looks at it.
ASKS = "elastic/asks"
#: Scope in which members say that they were given notice.
LEAVES = "elastic/leaves"
#: Scope in which members say how long their steps take; each forgets what it has said.
STEPS = "elastic/steps"
#: A member that has joined a running job has come to its elastic function.
BEGINS = "elastic/begins"
#: The results of object collectives before the first elastic function; rank 0 writes them once.
PROLOGUE = "elastic/prologue"
#: It has made its first commit.
PROGRESS = "elastic/progress"
#: A line for the user, in UTF-8.
SAYS = "elastic/says"
GENERATIONS_MAX = 1 << 20
#: Of one request to the store; it is asked again for as long as the job lives.
_WAIT_S = 1e6
_MOMENT_S = 0.2
_PROLOGUE_S = 30.0


def asks_scope(after: int) -> str:
    """Where members ask for a place after a generation."""
    return f"{ASKS}/{after}"


def place_scope(member: int, after: int) -> str:
    """Where a member is answered."""
    return f"{places_scope(member)}{after}"


def places_scope(member: int) -> str:
    """How all scopes begin where a member is answered."""
    return f"elastic/place/{member}/"


def lost_scope(generation: int) -> str:
    """Where members of a generation hear that one of them is lost, whatever they see of it themselves."""
    return f"elastic/lost/{generation}"


def notice_scope(generation: int) -> str:
    """Where rank 0 of a generation hears that its world is to come to a boundary."""
    return f"elastic/notice/{generation}"


def slow_scope(generation: int, number: int) -> str:
    """Where members of a generation hear who of them is slow, for the first time, the second ..."""
    return f"elastic/slow/{generation}/{number}/"


@dataclass(frozen=True)
class Question:
    """What a member says when it asks for a place."""

    after: int = 0  #: the last generation that it had a place in; 0: none
    wired: bool = False  #: whether it was connected in it
    progressed: bool = False  #: whether it has committed in it
    failure: str = ""  #: what a collective has failed with; empty: none has
    call: int = 0  #: of an elastic function, from 1, that it is in or was in last; 0: there was none yet
    #: The process sets of that world, each as the members that are in it.
    sets: list[list[int]] = field(default_factory=list)
    #: Members of that world whose processes it has seen dead, on its host.
    dead: list[int] = field(default_factory=list)
    commits: int = -1  #: number of the last commit of that call's state; -1: there is none

    def encoded(self) -> bytes:
        """As bytes for the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Question:
        """Read what a member has written; raises ValueError, TypeError or KeyError."""
        said = json.loads(data)
        sets = [[int(member) for member in members] for members in said["sets"]]
        flags = bool(said["wired"]), bool(said["progressed"]), str(said["failure"])
        dead = [int(member) for member in said["dead"]]
        return cls(int(said["after"]), *flags, int(said["call"]), sets, dead, int(said["commits"]))


@dataclass(frozen=True)
class Answer:
    """A place in the next world."""

    generation: int  #: 0: the job is over, or does not need this process any more
    #: By rank. With generation 0: the living members of the world that is left, in the order of
    #: ``Membership.world_left_by``.
    members: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)  #: of each, as the launcher numbers them
    #: Process sets of the former world, each as the ranks of its members that are left.
    sets: list[list[int]] = field(default_factory=list)
    leaves: str = ""  #: with generation 0: this process leaves with notice, "one" of its world or "all"
    call: int = 0  #: of an elastic function, the last that a member of this world has come to
    rendezvous: str = ""  #: where this member meets the others; empty: as it was told when it was started
    max_size: int = 0  #: ranks of the largest world that there may be
    #: The value of --on-state-lost if a state was committed before and no member of this world has it; else
    #: empty.
    state_lost: str = ""

    def encoded(self) -> bytes:
        """As bytes for the store."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decoded(cls, data: bytes) -> Answer:
        """Read what the launcher has written."""
        return cls(**json.loads(data))

    def placement(self, member: int) -> Placement:
        """This member's place."""
        return placements(self.hosts, self.generation)[self.members.index(member)]


class Seat:
    """A process's connection to the launcher of its elastic job, for as long as it lives.

    Thread-safe. A forked child has none.

    Args:
        store: a connection that this object now owns.
        member: the number of this process.
    """

    def __init__(self, store: ConnectedStore, member: int) -> None:
        self.member = member
        #: The last answer.
        self.answer = Answer(0)
        self._store = store
        self._lock = threading.Lock()
        self._notice = 0  # request; 0: there is none
        _seats.add(self)

    def next_place(self, question: Question, idle: Callable[[], None] = lambda: None) -> Answer:
        """Ask for a place in the next world, and wait for it: as long as the job lives.

        Args:
            question: what is asked.
            idle: called once, if there is no answer within a moment.

        Raises:
            StoreError: the launcher is gone.
            SystemExit: the job is over, or does not need this process any more.
        """
        with self._lock:
            scope = place_scope(self.member, question.after)
            self._store.put(asks_scope(question.after), self.member, question.encoded(), own=True)
            wait_s = _MOMENT_S
            while True:
                try:
                    (data,) = self._store.gather(scope, 1, wait_s)
                    break
                except GatherTimeoutError:
                    if wait_s == _MOMENT_S:
                        idle()
                    wait_s = _WAIT_S
            self._store.forget(asks_scope(question.after), self.member)
            self.answer = Answer.decoded(data)
            if self._notice:  # of the world before
                self._store.abandon(self._notice)
            self._notice = 0
            if self.answer.generation == 0:
                raise SystemExit(0)
            if self.answer.members[0] == self.member:
                scope = notice_scope(self.answer.generation)
                self._notice = self._store.post_gather(scope, 1, _WAIT_S)
            return self.answer

    def has_notice(self) -> bool:
        """On rank 0: whether its world is to come to a boundary. Never waits."""
        if not self._notice:  # of one reference, which only the thread that asks for places writes
            return False
        with self._lock:
            try:
                return self._store.take(self._notice) is not None
            except StoreError:  # with the launcher gone the process is about to be ended
                self._notice = 0
                return False

    def publish(self, prologue: bytes) -> None:
        """Write the results that :meth:`published` returns on members that join; the first ones count.

        Raises:
            StoreError: the launcher is gone.
        """
        with self._lock:
            self._store.put(PROLOGUE, 0, prologue)

    def published(self) -> bytes:
        """The results that a rank 0 has written when it came to its first elastic function.

        Raises:
            StoreError: there are none, or the launcher is gone.
        """
        with self._lock:
            try:
                return self._store.gather(PROLOGUE, 1, _PROLOGUE_S)[0]
            except GatherTimeoutError:
                raise StoreError(f"no rank has written results within {_PROLOGUE_S:g} s") from None

    def is_silent(self, silence_s: float) -> bool:
        """Whether nothing was heard of the launcher on this connection, either; from any thread."""
        return self._store.is_silent(silence_s)

    def hang_up(self) -> None:
        """Have whoever waits for a place hear that the launcher is gone; from any thread."""
        self._store.hang_up()

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._store.close()


_seats: weakref.WeakSet[Seat] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked process is no member, and must not keep the connection of its parent open."""
    for seat in list(_seats):
        seat._lock = threading.Lock()
        seat.close()


os.register_at_fork(after_in_child=_forget_in_child)
