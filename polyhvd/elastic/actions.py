"""What happens to the members of an elastic job, and what their membership decides. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Action", "Dismiss", "End", "Fate", "Finish", "Form", "Lose", "Notify", "Start"]


class Fate(Enum):
    """How a member has ended."""

    WELL = "well"  #: its program is done
    LOST = "lost"  #: it crashed, or it ended because it had lost another
    KILLED = "killed"  #: from outside, by SIGKILL or with its host
    FAILED = "failed"  #: of its own, so that it would again
    UNSTARTABLE = "unstartable"  #: there is no such program, or no way onto the host


@dataclass(frozen=True)
class Start:
    """Start a process."""

    member: int
    host: str
    slot: int  #: among those of the host


@dataclass(frozen=True)
class Form:
    """Here is the next world: tell its members, which have all asked for it."""

    generation: int
    members: tuple[int, ...]  #: by rank
    hosts: tuple[str, ...]  #: of each
    state_lost: bool = False  #: whether a state was committed before, and no member has it


@dataclass(frozen=True)
class Lose:
    """A member of this generation is lost: whoever still waits for it is to give up."""

    generation: int
    member: int
    reason: str = ""  #: why it counts as lost though its process has not ended; empty: it has


@dataclass(frozen=True)
class Notify:
    """Have the world of this generation come to a boundary of steps, and ask for the next one."""

    generation: int


@dataclass(frozen=True)
class Dismiss:
    """End this process; what it was needed for is over."""

    member: int


@dataclass(frozen=True)
class Finish:
    """The job is done: end what still waits for a place."""


@dataclass(frozen=True)
class End:
    """The job has failed."""

    reason: str
    cause: int | None = None  #: the member that is to be blamed
    resumable: bool = False


Action = Start | Form | Lose | Notify | Dismiss | Finish | End
