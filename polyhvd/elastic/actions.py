"""How members of an elastic job end, and the actions that their membership decides on. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

__all__ = ["Action", "Dismiss", "End", "ExitKind", "Finish", "Form", "Lose", "Notify", "Start"]


class ExitKind(Enum):
    """How a member has ended."""

    WELL = "well"  #: its program is done
    LOST = "lost"  #: it crashed, or it ended because it had lost another
    KILLED = "killed"  #: from outside, by SIGKILL or with its host
    FAILED = "failed"  #: by itself, so that another attempt would fail, too
    UNSTARTABLE = "unstartable"  #: there is no such program, or the host cannot be reached


@dataclass(frozen=True)
class Start:
    """Start a process."""

    member: int
    host: str
    slot: int  #: among those of the host


@dataclass(frozen=True)
class Form:
    """Form the next world: reply to its members, which have all requested a place."""

    generation: int
    members: tuple[int, ...]  #: by rank
    hosts: tuple[str, ...]  #: of each
    state_lost: bool = False  #: whether a state was committed before, and no member has it


@dataclass(frozen=True)
class Lose:
    """A member of this generation is lost: notify the members that wait for it."""

    generation: int
    member: int
    reason: str = ""  #: why it counts as lost though its process has not ended; empty: it has


@dataclass(frozen=True)
class Notify:
    """Make the world of this generation stop between two steps, and request places in the next one."""

    generation: int


@dataclass(frozen=True)
class Dismiss:
    """End this process, which is not needed any more."""

    member: int


@dataclass(frozen=True)
class Finish:
    """The job is done: end the processes that still wait for a place."""


@dataclass(frozen=True)
class End:
    """The job has failed."""

    reason: str
    cause: int | None = None  #: the member that caused the failure
    resumable: bool = False


Action = Start | Form | Lose | Notify | Dismiss | Finish | End
