"""How the ranks of a job are ended: which signal is due when. Pure: it is given the time, sends nothing."""

from __future__ import annotations

import signal
from collections.abc import Iterator

from polyhvd.launch.job import agent

__all__ = ["Stopping"]

_KILL_GRACE_S = 5.0


class Stopping:
    """First a gentle signal, then SIGTERM if it was another one, then SIGKILL, then the agents are killed.

    Args:
        term_grace_s: seconds from SIGTERM to SIGKILL.

    Example::

        stopping = Stopping(term_grace_s=30.0)
        stopping.receive(signal.SIGTERM, now)  # True: this begins the end of the job
        list(stopping.take_due(now + 30.0))  # [SIGTERM, SIGKILL]
    """

    def __init__(self, term_grace_s: float) -> None:
        self._term_grace_s = term_grace_s
        self.begun = False  # ranks end because of signals from here, not by themselves
        self.at_once = False  # a second signal has asked for it
        self.received: dict[int, float] = {}  # the signals that have asked for the end: when each first came
        self.begun_at: float | None = None
        self._failed_at: float | None = None  # when to stop the others of a rank that has failed
        self._plan: list[tuple[float, int]] = []

    def plan_after_failure(self, at: float) -> None:
        """A rank has failed: the others are to be stopped at this moment, or at an earlier failure's."""
        self._failed_at = at if self._failed_at is None else min(at, self._failed_at)

    def is_due_after_failure(self, now: float) -> bool:
        """Return whether the moment of :meth:`plan_after_failure` has come."""
        return self._failed_at is not None and now >= self._failed_at

    def begin(self, number: int, now: float) -> None:
        """Begin with this signal."""
        self.begun = True
        self.begun_at = now if self.begun_at is None else self.begun_at
        self._failed_at = None
        self._plan = [(now, number)]
        if number != signal.SIGTERM:
            now += agent.INTERRUPT_GRACE_S
            self._plan.append((now, signal.SIGTERM))
        now += self._term_grace_s
        self._plan += [(now, signal.SIGKILL), (now + _KILL_GRACE_S, 0)]

    def receive(self, number: int, now: float) -> bool:
        """The launcher has received a signal that ends the job; returns whether this begins the end.

        A program that ends every process of a job (Slurm, systemd, a closed terminal) may send it twice, or
        send two signals, also while ranks have begun to fail because of it: none of that is a request to
        kill at once.
        """
        first_at = self.received.setdefault(number, now)
        again = first_at != now and (number == signal.SIGINT or now >= first_at + agent.REPEAT_S)
        if again or (self.begun and number == signal.SIGINT):
            self.begun = self.at_once = True
            self.begun_at = now if self.begun_at is None else self.begun_at
            self._plan = [(now, signal.SIGKILL), (now + _KILL_GRACE_S, 0)]
        elif not self.begun:
            self.begin(number, now)
            return True
        elif number == signal.SIGTERM and first_at == now and len(self.received) > 1 and not self.at_once:
            self.begin(number, now)
        return False

    def take_due(self, now: float) -> Iterator[int]:
        """The signals that are due; 0: to kill the agents."""
        while self._plan and now >= self._plan[0][0]:
            yield self._plan.pop(0)[1]

    def next_at(self) -> float:
        """Return when the next action is due; infinite: never."""
        times = [moment for moment, _ in self._plan[:1]]
        return min(times if self._failed_at is None else [*times, self._failed_at], default=float("inf"))
