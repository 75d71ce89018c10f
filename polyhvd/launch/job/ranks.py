"""The ranks in a job's loop: those of a fixed job, or those of an elastic one, which has a driver."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Protocol

from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job import situation
from polyhvd.launch.job.blame import Ending
from polyhvd.launch.job.policy import Decision, FailurePolicy, StartReplacement
from polyhvd.runtime.placement import Placement

if TYPE_CHECKING:
    from polyhvd.launch.elastic.driven import DrivenJob
    from polyhvd.launch.hosts.checks import Problem
    from polyhvd.launch.job.control import Request
    from polyhvd.launch.job.spec import JobSpec

__all__ = ["FixedRanks", "Ranks", "ranks_of"]


class Ranks(Protocol):
    """The interface that the loop calls."""

    @property
    def noun(self) -> str:
        """The noun for one of them in messages."""

    @property
    def renews(self) -> bool:
        """Whether others are started in the place of those that have ended."""

    @property
    def over(self) -> bool:
        """Whether nothing more will be started."""

    @property
    def wake(self) -> int | None:
        """A descriptor that is readable when :meth:`turn` has something to do; None: it never has."""

    @property
    def observe(self) -> Callable[[str, int, bytes], None] | None:
        """A function to call with each entry of the rendezvous: scope, number and value."""

    def begin(self, job: DrivenJob, now: float) -> None:
        """All that is placed was started."""

    def turn(self, now: float) -> None:
        """Do what is due."""

    def next_at(self, now: float) -> float:
        """Return when :meth:`turn` has something to do even if ``wake`` is not readable."""

    def on_ending(self, ending: Ending, running: Set[int], now: float) -> Decision:
        """See :meth:`polyhvd.launch.job.policy.FailurePolicy.on_ending`."""

    def refuse(self, number: int, problems: Sequence[Problem], now: float) -> set[int]:
        """The host of this number is not fit; returns the members that it was to have."""

    def host_leaves(self, number: int, now: float) -> None:
        """The agent on the host of this number was sent SIGTERM."""

    def stop(self, now: float, *, notice: bool) -> None:
        """The launcher was sent a signal; with ``notice`` there is time to leave in good order."""

    def obey(self, request: Request, now: float) -> None:
        """A command has sent a request other than for the status; it is to be answered and closed."""

    def situation(self, running: Set[int], late: Mapping[str, float], now: float) -> situation.Situation:
        """The current state of the job.

        Args:
            running: those that have not ended.
            late: hosts whose agents have not answered, and since when.
            now: the time.
        """

    def summary(self, *, failed: bool) -> str:
        """A line for the end of the job; empty: none."""

    def close(self) -> None:
        """Free what is held."""


class FixedRanks:
    """Ranks that all start at the beginning; a policy decides what follows when one ends."""

    noun = "rank"
    renews = False
    wake = None
    observe = None
    over = True

    def __init__(
        self, policy: FailurePolicy, placements: Sequence[Placement] = (), hosts: Sequence[Host] = ()
    ) -> None:
        self._policy = policy
        self._placements = placements
        self._hosts = hosts
        self._begun_at: float | None = None

    def begin(self, job: DrivenJob, now: float) -> None:
        """Record the time for :meth:`situation`."""
        self._begun_at = now

    def turn(self, now: float) -> None:
        """Nothing is ever due."""

    def next_at(self, now: float) -> float:
        """Never."""
        return float("inf")

    def on_ending(self, ending: Ending, running: Set[int], now: float) -> Decision:
        """Return the policy's decision; raises NotImplementedError if that is a replacement."""
        decision = self._policy.on_ending(ending, running, now)
        if isinstance(decision, StartReplacement):
            raise NotImplementedError(f"rank {ending.rank}: only an elastic job can replace its ranks")
        return decision

    def refuse(self, number: int, problems: Sequence[Problem], now: float) -> set[int]:
        """Hosts are checked before anything starts."""
        return set()

    def host_leaves(self, number: int, now: float) -> None:
        """The ranks there end, which the policy judges."""

    def stop(self, now: float, *, notice: bool) -> None:
        """The ranks get the signal itself."""

    def obey(self, request: Request, now: float) -> None:
        """No rank can leave."""
        request.answer(error="this job is not elastic: its ranks cannot leave it")
        request.close()

    def situation(self, running: Set[int], late: Mapping[str, float], now: float) -> situation.Situation:
        """Which ranks have ended."""
        return situation.fixed(self._placements, self._hosts, running, late, self._begun_at)

    def summary(self, *, failed: bool) -> str:
        """None."""
        return ""

    def close(self) -> None:
        """Nothing is held."""


def ranks_of(spec: JobSpec) -> Ranks:
    """Return the ranks of a job."""
    if spec.elastic is None:
        return FixedRanks(spec.policy, spec.placements, spec.hosts)
    from polyhvd.launch.elastic.driver import Driver  # most jobs are not elastic

    return Driver(spec.elastic, spec.hosts)
