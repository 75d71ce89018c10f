"""Agents on this host. Not for ranks: those find their places by :mod:`polyhvd.launch.providers.local`."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job.agent_process import AgentProcess
from polyhvd.launch.job.agent_program import agent_code, code_reader

__all__ = ["LocalAgent", "LocalAgents"]

_STRAYS_S = 2.0
#: Together they identify the processes of one agent, children of its ranks included.
_MARKS = ("POLYHVD_SECRET", "POLYHVD_HOST_ID")


class LocalAgents:
    """See :class:`polyhvd.launch.providers.starting.AgentProvider`."""

    def agent(self, host: Host) -> LocalAgent:
        """Start an agent."""
        return LocalAgent(host.name)


class LocalAgent(AgentProcess):
    """An agent on this host. Its ranks have this process's environment as it has."""

    def __init__(self, host: str) -> None:
        """Start it; it ends with this process."""
        code = agent_code()
        python = [sys.executable, "-I", "-S", "-c", code_reader(len(code))]
        super().__init__(host, [*python, str(os.getpid())], code)
        self._marks: set[bytes] = set()

    def start(self, job: dict[str, Any]) -> None:
        """Have it start the ranks of ``job``, once it answers."""
        self._marks = {os.fsencode(f"{name}={job['env'][name]}") for name in _MARKS}
        super().start(job)

    def end_strays(self) -> None:
        """Kill processes of its job that have outlived the agent and its guard."""
        deadline = time.monotonic() + _STRAYS_S
        while self._marks:
            environments = Path("/proc").glob("[0-9]*/environ")
            strays = [int(path.parent.name) for path in environments if self._marks <= _variables(path)]
            for pid in strays:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            if not strays or time.monotonic() >= deadline:
                return
            time.sleep(0.01)


def _variables(environ: Path) -> set[bytes]:
    try:
        return set(environ.read_bytes().split(b"\0"))
    except OSError:
        return set()  # gone, or another user's
