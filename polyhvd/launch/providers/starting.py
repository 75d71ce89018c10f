"""How polyhvdrun starts ranks: a provider starts one agent on each host, and the agent starts the ranks.

An agent is :mod:`polyhvd.launch.job.agent` wherever it runs. What differs is how it gets onto a host and how
its frames come back; a further way is one more file beside ``local_agents.py`` and ``ssh.py``. None of this
is for ranks: how they find their places is :mod:`polyhvd.launch.providers.provider`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import IO, Any, Protocol

from polyhvd.launch.hosts.lists import Host

__all__ = ["AgentProvider", "HostAgent"]


class HostAgent(Protocol):
    """A running agent as a job sees it. When it ends, so do its ranks and all that they have started."""

    #: The program that messages name when the agent has ended: "ssh".
    program: str
    #: The host, as users name it.
    host: str
    #: The ranks that it has to start and whose ends :meth:`receive` has not returned.
    ranks: list[int]
    #: Whether it has answered.
    ready: bool
    #: Whether nothing more will come from it.
    ended: bool
    #: The last lines of error output of the agent, or of the program that has started it.
    complaints: deque[str]
    #: Why it counts as lost, where that is known better than by its end; else empty.
    fault: str
    #: Streams for a selector: to send messages, to receive frames, and to receive complaints.
    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]

    @property
    def unread_bytes(self) -> int:
        """How much :meth:`put_aside` has read that :meth:`receive` has not returned."""

    @property
    def environment(self) -> Mapping[str, str]:
        """Variables of the launcher's environment that its ranks get; they have the agent's own anyway."""

    def start(self, job: dict[str, Any]) -> None:
        """Have it start ranks, once it answers.

        It may be called again while one of its ranks runs, with the ranks that are to be added: the agent
        ends with its last one.

        Args:
            job: ``argv``, ``cwd``, ``env``, ``grace_s``, ``ignored`` and ``unset`` of these ranks, and
                ``ranks``: pairs of a rank and what its own environment has besides. With ``stays`` the
                agent does not end with its last rank, but waits for more until it is cut.
        """

    def put_aside(self) -> bool:
        """Read what has arrived, for :meth:`receive` to return later; False if nothing has."""

    def receive(self) -> list[tuple[int, int, bytes]]:
        """Take the frames that have come: what ranks have written, and how they have ended.

        Each rank that :meth:`start` was called with has one frame of its end, EXITED or FAILED, after all
        that it has written, unless the agent itself is lost: then ``ended`` is set without it.

        Raises:
            ValueError: this is not an agent's.
        """

    def is_done(self) -> bool:
        """Return whether no more messages will come, and the end of every rank has come."""

    def complain(self) -> bool:
        """Take what has come for ``complaints``; False when there is nothing."""

    def signal(self, number: int) -> None:
        """Send a signal to all its ranks that still run; SIGKILL to what they have started, too."""

    def send(self, kind: int, payload: bytes = b"", number: int = -1) -> None:
        """Send a frame, such as BEAT, once it has answered; never waits.

        ``number`` stands where a rank would: that of an EXAMINE, below 0.
        """

    def flush(self) -> bool:
        """Send what could not be sent at once; False when some of it is left."""

    def cut(self) -> None:
        """Have it kill its ranks and end."""

    def kill(self) -> None:
        """End it at once."""

    def end_strays(self) -> None:
        """Kill what has outlived a lost agent, where that is this process's to do."""

    def has_exited(self) -> bool:
        """Return whether :meth:`close` has nothing to wait for."""

    def close(self) -> int:
        """End it, by force if need be; returns its exit status."""


class AgentProvider(Protocol):
    """A way to get an agent onto a host."""

    def agent(self, host: Host) -> HostAgent:
        """Start an agent; that it cannot be reached is seen on the agent, not raised.

        Raises:
            OSError: there is no program to start it with.
        """
