"""The agents of a job: the host of each, its deadline to respond, and which of them have ended."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from polyhvd.launch.providers.starting import HostAgent

__all__ = ["Agents"]

#: So long an agent that has ended is remembered: by then its process is gone, too, and none waits for that.
_REMEMBERED_S = 1.0


@dataclass
class _Post:
    number: int  # of the host
    start_by: float
    ended_at: float | None = None


class Agents:
    """See the module. Iterates over all that are remembered, in the order in which they were started.

    Example::

        agents.add(process, number=3, start_by=now + 30.0)
        agents.number_of(process)  # 3
    """

    def __init__(self) -> None:
        self._posts: dict[HostAgent, _Post] = {}

    def __iter__(self) -> Iterator[HostAgent]:
        return iter(list(self._posts))

    def __len__(self) -> int:
        return len(self._posts)

    def add(self, process: HostAgent, number: int, start_by: float) -> None:
        """An agent was started on the host of this number."""
        self._posts[process] = _Post(number, start_by)

    def number_of(self, process: HostAgent) -> int:
        """The number of its host."""
        return self._posts[process].number

    def start_by(self, process: HostAgent) -> float:
        """Return when it must have answered, by ``time.monotonic()``."""
        return self._posts[process].start_by

    def has_ended(self, process: HostAgent, now: float) -> bool:
        """An agent has ended; returns whether that is news."""
        post = self._posts.get(process)
        if post is None or post.ended_at is not None:
            return False
        post.ended_at = now
        return True

    def take_gone(self, now: float, spared: Callable[[HostAgent], bool]) -> list[HostAgent]:
        """Forget those that have ended a while ago, and are not spared: a job of months loses many hosts."""
        before = now - _REMEMBERED_S
        ended = {item: post.ended_at for item, post in self._posts.items() if post.ended_at is not None}
        gone = [item for item, ended_at in ended.items() if ended_at <= before and not spared(item)]
        for process in gone:
            del self._posts[process]
        return gone
