"""Heartbeats between the launcher and the agents of a job, and what agents have not taken yet."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterable
from typing import IO

from polyhvd.launch.job import agent
from polyhvd.launch.providers.starting import HostAgent

__all__ = ["Heartbeats", "Outboxes"]


class Heartbeats:
    """See :class:`polyhvd.launch.job.agent.Heartbeat`, of which each agent that has answered has one.

    Args:
        silence_s: how long an agent may be silent; 0: for ever.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._beats: dict[HostAgent, agent.Heartbeat] = {}

    def received_from(self, process: HostAgent) -> None:
        """Something was received from an agent, or there is a reason for its silence."""
        if process in self._beats:
            self._beats[process].received(time.monotonic())

    def forget(self, process: HostAgent) -> None:
        """An agent has ended."""
        self._beats.pop(process, None)

    def exchange(
        self, agents: Iterable[HostAgent], now: float, spared: Callable[[HostAgent], bool]
    ) -> list[HostAgent]:
        """Send the agents ours; returns those that have sent none for too long.

        Those that are ``spared`` have no job yet, and beat less often.
        """
        silent = []
        for process in agents:
            if not process.ready:
                continue
            beat = self._beats.setdefault(process, agent.Heartbeat(self.silence_s, now))
            if spared(process):
                beat.received(now)
            if beat.is_due(now):
                process.send(agent.BEAT)
            if beat.is_silent(now) and not process.ended:
                silent.append(process)
        return silent

    def timer_s(self, now: float) -> float:
        """Seconds until :meth:`exchange` has to be called again; infinite: never."""
        return min((beat.timer_s(now) for beat in self._beats.values()), default=float("inf"))


class Outboxes:
    """Agents that do not take at once all that is sent to them; a selector reports when they take more."""

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._full: list[IO[bytes]] = []  # inputs of agents that take no more for now

    def watch(self, agents: Iterable[HostAgent]) -> None:
        """Wake up when an agent takes more."""
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
