"""The record of how a job's ranks have ended, and the exit status that follows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polyhvd.elastic.limits import FINISHED, PROGRESSES
from polyhvd.launch.job.blame import Ending, describe, exit_status, first_cause, had_failed, others

__all__ = ["Verdict"]


class Verdict:
    """See the module.

    Args:
        noun: what messages call a rank.
    """

    def __init__(self, noun: str) -> None:
        self._noun = noun
        self.status = 0  # of the job, if no rank has one
        self.cause: Ending | None = None  # of the job's failure, after :meth:`conclude`
        self._failures: list[Ending] = []  # before the others were stopped, in their order
        self._late: list[Ending] = []  # of ranks that had failed when they were stopped
        self._meanwhile: list[Ending] = []  # of ranks that failed while they were stopped
        self._reported: dict[int, list[bytes]] = {}  # by engines, see Ending.suffered
        self._progress: dict[int, bytes] = {}  # likewise, see Ending.progress
        self._remarks: dict[int, str] = {}  # by agents, see Ending.remark

    @property
    def failed(self) -> bool:
        """Whether the job has failed by itself."""
        return bool(self._failures or self.status)

    @property
    def reason(self) -> str:
        """Why the job ends, as far as is known: a failure in a line; empty: none."""
        found = first_cause([*self._failures, *self._late]) if self._failures else None
        return "" if found is None else describe(found)

    def report(self, rank: int, payload: bytes) -> None:
        """A rank's engine has reported something: errors that others have caused, or its progress."""
        items = [item for item in payload.split(b"\0") if item]
        self._reported[rank] = [item for item in items if item not in PROGRESSES]
        self._progress.update((rank, item) for item in items if item in PROGRESSES)  # the last one counts

    def suspect_memory(self, rank: int, of_cgroup: int, of_host: int) -> None:
        """A rank was killed, and the kernel has killed processes for lack of memory since the job began."""
        self._remarks[rank] = (
            "out of memory? Since the job began, the kernel has killed for lack of memory: "
            f"{of_cgroup} in the cgroup (container) of this rank, {of_host} on its host"
        )

    def has_finished(self, rank: int) -> bool:
        """Return whether a rank has reported that its work is done."""
        return self._progress.get(rank) == FINISHED

    def ending(self, rank: int, host: str, status: int, tail: Sequence[bytes], reason: str = "") -> Ending:
        """How a rank has ended, with what it has reported. The arguments are Ending's."""
        progress = self._progress.get(rank, b"")
        suffered, remark = self._reported.get(rank, []), self._remarks.get(rank, "")
        return Ending(rank, host, status, tail, reason, suffered, self._noun, progress, remark)

    def forget(self, rank: int) -> None:
        """The rank has ended: its reports are in its ending."""
        self._reported.pop(rank, None)
        self._progress.pop(rank, None)
        self._remarks.pop(rank, None)

    def add(self, failure: Ending) -> None:
        """A rank has failed, which may be why the job ends."""
        self._failures.append(failure)

    def add_late(self, endings: Iterable[Ending]) -> None:
        """How those would end that are about to be stopped: some may have failed already."""
        self._late += filter(had_failed, endings)

    def add_meanwhile(self, failure: Ending) -> None:
        """A rank has failed while all were stopped."""
        self._meanwhile.append(failure)

    def conclude(self, signals: Iterable[int]) -> int:
        """The exit status of the job; looks for the cause if there is a failure.

        Args:
            signals: that have ended the job, the first first.
        """
        if self.status:
            return self.status
        if self._failures:
            self.cause = first_cause([*self._failures, *self._late])
            return exit_status(self.cause)
        return next((128 + number for number in signals), 0)

    def lines(self) -> list[str]:
        """The report of the failures after :meth:`conclude`; the last line is the cause."""
        if self.cause is None:
            return []
        meanwhile = [item for item in self._meanwhile if item.rank != self.cause.rank]
        return [*others([*self._failures, *meanwhile], self.cause), describe(self.cause)]
