"""The settings of an elastic job, and its interface for the driver. Most jobs are not: it imports little."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from polyhvd.elastic.limits import RESUME_STATUS
from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job.blame import Ending
from polyhvd.rendezvous.server import Server
from polyhvd.runtime.placement import Placement

if TYPE_CHECKING:
    from collections.abc import Callable

    from polyhvd.elastic.limits import Limits

__all__ = ["HEARTBEAT_TIMEOUT_S", "RESUME_STATUS", "DrivenJob", "Elastic", "Hosts"]

#: Replaces :mod:`polyhvd.launch.job.agent`'s. Ranks wait for a host that is cut off until it is given up,
#: which has to happen within 5 s. It costs a heartbeat every two thirds of a second. An agent that is stopped
#: or starved for three seconds still answers in time.
HEARTBEAT_TIMEOUT_S = 4.0


class Hosts(Protocol):
    """Hosts that change, as the driver sees them: :class:`polyhvd.launch.elastic.discovery.Discovery`."""

    def begin(self, ring: Callable[[], None]) -> None:
        """Begin; ``ring`` is called, on any thread, when there is something to take."""

    def take(self) -> Mapping[str, int] | None:
        """The hosts with their slots, if they have changed since they were taken last."""

    def complaints(self) -> list[str]:
        """New messages for the user, each once."""

    def close(self) -> None:
        """End, without waiting."""


@dataclass(frozen=True)
class Elastic:
    """The settings of an elastic job."""

    limits: Limits
    hosts: list[Host]  #: at the beginning
    discovery: Hosts | None = None  #: None: the hosts stay these
    slow_factor: float = 1.5  #: a rank is slow if it takes this many times as long as the others
    evicts_slow: bool = False  #: whether a spare takes its place
    replaces_failed: bool = False  #: whether a process that has failed counts as lost
    on_state_lost: str = "fail"  #: or "restart": what train() does where no process has the state any more


class DrivenJob(Protocol):
    """A job as its driver sees it."""

    rendezvous: Server

    def start_member(
        self, member: int, place: Placement, host: Host, number: int, *, knows_rank: bool
    ) -> None:
        """Start a process on the host of this number; ``place`` is what its environment says.

        Without ``knows_rank`` only the place on its host counts.
        """

    def kill_member(self, member: int) -> None:
        """End a process at once."""

    def endpoint(self, number: int, numbers: Set[int]) -> str:
        """Return where the ranks of host ``number`` meet those of the hosts ``numbers``."""

    def report(self, text: str) -> None:
        """Print a line for the user."""

    def end(self, reason: str, cause: Ending | None, status: int) -> None:
        """End the job, which has failed, with this status where there is no cause that has another."""

    def finish(self) -> None:
        """End what still runs: the job is done."""
