"""The messages between the members of an elastic job and its launcher, sent through the job's store.

A member requests a place, receives a reply when the next world is formed, and is notified when its world is
to stop at a boundary. Each generation has separate scopes, so messages of two generations never mix.
"""

from __future__ import annotations

import json
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

from polyhvd.rendezvous.client import ConnectedStore
from polyhvd.rendezvous.store import GatherTimeoutError, StoreError
from polyhvd.runtime.placement import Placement, placements

__all__ = [
    "BEGUN_CALLS",
    "LEAVE_NOTICES",
    "MESSAGES",
    "PLACE_REQUESTS",
    "PROGRESS",
    "STEPS",
    "LauncherConnection",
    "PlaceReply",
    "PlaceRequest",
    "lost_scope",
    "notice_scope",
    "place_scope",
    "places_scope",
    "slow_scope",
]

#: Scope of the members' place requests.
PLACE_REQUESTS = "elastic/asks"
#: Scope in which members report that they were given notice.
LEAVE_NOTICES = "elastic/leaves"
#: Scope in which members report how long their steps take; each deletes its value after sending.
STEPS = "elastic/steps"
#: Scope in which a member that has joined a running job reports that it is in its elastic function.
BEGUN_CALLS = "elastic/begins"
#: The results of object collectives before the first elastic function; rank 0 writes them once.
PROLOGUE = "elastic/prologue"
#: Scope in which a member reports its first commit.
PROGRESS = "elastic/progress"
#: Scope of lines for the launcher to print, in UTF-8.
MESSAGES = "elastic/says"
#: Limit of one request to the store: longer than any job lives.
_WAIT_S = 1e9
_MOMENT_S = 0.2
_PROLOGUE_S = 30.0


def place_requests_scope(after: int) -> str:
    """The scope of requests for a place after a generation."""
    return f"{PLACE_REQUESTS}/{after}"


def place_scope(member: int, after: int) -> str:
    """The scope of the reply to a member."""
    return f"{places_scope(member)}{after}"


def places_scope(member: int) -> str:
    """The prefix of the scopes of all replies to a member."""
    return f"elastic/place/{member}/"


def lost_scope(generation: int) -> str:
    """The scope in which members of a generation are notified that one of them is lost."""
    return f"elastic/lost/{generation}"


def notice_scope(generation: int) -> str:
    """The scope in which rank 0 of a generation is notified that its world is to stop at a boundary."""
    return f"elastic/notice/{generation}"


def slow_scope(generation: int, number: int) -> str:
    """The scope of the report of slow ranks with this number in a generation."""
    return f"elastic/slow/{generation}/{number}/"


@dataclass(frozen=True)
class PlaceRequest:
    """A member's request for a place."""

    after: int = 0  #: the last generation that it had a place in; 0: none
    wired: bool = False  #: whether it was connected in it; the messages have this name
    progressed: bool = False  #: whether it has committed in it
    failure: str = ""  #: the error of a failed collective; empty: none has failed
    call: int = 0  #: of an elastic function, from 1, that it is in or was in last; 0: there was none yet
    #: The process sets of that world, each as the members that are in it.
    sets: list[list[int]] = field(default_factory=list)
    #: Members of that world whose processes it has seen dead, on its host.
    dead: list[int] = field(default_factory=list)
    commits: int = -1  #: number of the last commit of that call's state; -1: there is none

    @property
    def commit(self) -> tuple[int, int]:
        """The numbers of the call and of its last commit. A greater one is newer."""
        return self.call, self.commits

    def encoded(self) -> bytes:
        """Return it as bytes for the store."""
        return json.dumps(vars(self)).encode()  # asdict() would copy thousands of elements

    @classmethod
    def decoded(cls, data: bytes) -> PlaceRequest:
        """Decode a member's request; raises ValueError, TypeError or KeyError."""
        values = json.loads(data)
        sets = [[int(member) for member in members] for members in values["sets"]]
        flags = bool(values["wired"]), bool(values["progressed"]), str(values["failure"])
        dead = [int(member) for member in values["dead"]]
        return cls(int(values["after"]), *flags, int(values["call"]), sets, dead, int(values["commits"]))


@dataclass(frozen=True)
class PlaceReply:
    """The launcher's reply: a place in the next world."""

    generation: int  #: 0: the job is over, or does not need this process any more
    #: By rank. With generation 0: the living members of the world that this process leaves, in the order
    #: of ``Membership.departed_world``.
    members: list[int] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)  #: of each, as the launcher numbers them
    #: Process sets of the former world, each as the ranks of its remaining members.
    sets: list[list[int]] = field(default_factory=list)
    leaves: str = ""  #: with generation 0: this process leaves with notice, "one" of its world or "all"
    call: int = 0  #: of an elastic function, the last that a member of this world has come to
    rendezvous: str = ""  #: where the ranks meet; empty: the address in the environment
    max_size: int = 0  #: ranks of the largest world that there may be
    #: The value of --on-state-lost if a state was committed before and no member of this world has it; else
    #: empty.
    state_lost: str = ""
    saves: bool = False  #: with generation 0: the job has failed, and this process writes its last commit

    def encoded(self) -> bytes:
        """Return it as bytes for the store."""
        return json.dumps(vars(self)).encode()  # asdict() would copy thousands of elements

    @classmethod
    def decoded(cls, data: bytes) -> PlaceReply:
        """Decode the launcher's reply."""
        return cls(**json.loads(data))

    def placement(self, member: int) -> Placement:
        """This member's place."""
        return placements(self.hosts, self.generation)[self.members.index(member)]


class LauncherConnection:
    """A process's connection to the launcher of its elastic job, for as long as it lives.

    Thread-safe. A forked child has none.

    Args:
        store: a connection that this object now owns.
        member: the number of this process.
    """

    def __init__(self, store: ConnectedStore, member: int) -> None:
        self.member = member
        #: The last reply.
        self.reply = PlaceReply(0)
        self._store = store
        self._lock = threading.Lock()
        self._notice = 0  # request; 0: there is none
        _connections.add(self)

    def next_place(self, request: PlaceRequest, idle: Callable[[], None] = lambda: None) -> PlaceReply:
        """Request a place in the next world, and wait for the reply while the job lives.

        Args:
            request: what to send.
            idle: called once, if there is no reply within a moment.

        Raises:
            StoreError: the launcher is gone.
            SystemExit: the job is over, or does not need this process any more.
        """
        with self._lock:
            scope = place_scope(self.member, request.after)
            self._store.put(place_requests_scope(request.after), self.member, request.encoded(), own=True)
            wait_s = _MOMENT_S
            while True:
                try:
                    (data,) = self._store.gather(scope, 1, wait_s)
                    break
                except GatherTimeoutError:
                    if wait_s == _MOMENT_S:
                        idle()
                    wait_s = _WAIT_S
            self._store.forget(place_requests_scope(request.after), self.member)
            self.reply = PlaceReply.decoded(data)
            if self._notice:  # of the world before
                self._store.abandon(self._notice)
            self._notice = 0
            if self.reply.generation == 0:
                raise SystemExit(0)
            if self.reply.members[0] == self.member:
                scope = notice_scope(self.reply.generation)
                self._notice = self._store.post_gather(scope, 1, _WAIT_S)
            return self.reply

    def has_notice(self) -> bool:
        """On rank 0: whether its world is to come to a boundary. Never waits."""
        if not self._notice:  # only the thread that requests places writes this reference
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
        """Return whether nothing was received from the launcher on this connection; from any thread."""
        return self._store.is_silent(silence_s)

    def hang_up(self) -> None:
        """Make a thread that waits for a place raise StoreError; from any thread."""
        self._store.hang_up()

    def close(self) -> None:
        """Close the connection; idempotent."""
        self._store.close()


_connections: weakref.WeakSet[LauncherConnection] = weakref.WeakSet()


def _forget_in_child() -> None:
    """A forked process is not a member and must not keep its parent's connection open."""
    for launcher in list(_connections):
        launcher._lock = threading.Lock()
        launcher.close()


os.register_at_fork(after_in_child=_forget_in_child)
