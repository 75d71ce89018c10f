"""What the launcher keeps up with all agents of a job: signs of life, and what they are still to be told."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterable
from typing import IO

from polyhvd.launch import agent
from polyhvd.launch.providers.starting import HostAgent

__all__ = ["Outboxes", "Pulses"]


class Pulses:
    """See :class:`polyhvd.launch.agent.Heartbeat`, of which each agent that has answered has one.

    Args:
        silence_s: how long an agent may be silent; 0: for ever.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._beats: dict[HostAgent, agent.Heartbeat] = {}

    def hear(self, process: HostAgent) -> None:
        """Something has come from an agent, or it is not to be blamed that nothing has."""
        if process in self._beats:
            self._beats[process].heard(time.monotonic())

    def forget(self, process: HostAgent) -> None:
        """An agent has ended."""
        self._beats.pop(process, None)

    def exchange(
        self, agents: Iterable[HostAgent], now: float, spared: Callable[[HostAgent], bool]
    ) -> list[HostAgent]:
        """Give the agents ours, and say which have given none for too long.

        Those that are ``spared`` have no job yet, and beat less often.
        """
        silent = []
        for process in agents:
            if not process.ready:
                continue
            beat = self._beats.setdefault(process, agent.Heartbeat(self.silence_s, now))
            if spared(process):
                beat.heard(now)
            if beat.is_due(now):
                process.tell(agent.BEAT)
            if beat.is_silent(now) and not process.ended:
                silent.append(process)
        return silent

    def timer_s(self, now: float) -> float:
        """Seconds until :meth:`exchange` has to be called again; infinite: never."""
        return min((beat.timer_s(now) for beat in self._beats.values()), default=float("inf"))


class Outboxes:
    """Which agents do not take all that they are told at once, so that a selector is to say when they do."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._full: list[IO[bytes]] = []  # inputs of agents that take nothing for now

    def watch(self, agents: Iterable[HostAgent]) -> None:
        """Wake up when an agent takes more of what it is to be told."""
        for process in agents:
            if process.ended:
                continue
            if process.flush():
                self.forget(process)
            elif process.stdin not in self._full:
                self._full.append(process.stdin)
                self._selector.register(process.stdin, selectors.EVENT_WRITE, (process, process.flush))

    def forget(self, process: HostAgent) -> None:
        """This agent takes everything, or nothing any more."""
        if process.stdin in self._full:
            self._full.remove(process.stdin)
            self._selector.unregister(process.stdin)
