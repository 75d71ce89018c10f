"""Where processes of a job kill themselves, as a test wants it."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path

from polyhvd.runtime import bootstrap


class Kills:
    """Places at which a process dies, each once in the whole job.

    Args:
        folder: of the job; what has happened is a file there.
        places: as :meth:`die_at` is given them, joined by colons.
    """

    def __init__(self, folder: Path, places: Sequence[str]) -> None:
        self._folder = folder
        self._places = set(places)

    def is_wanted(self, *place: object) -> bool:
        """Whether somebody is to die here, or has."""
        return ":".join(map(str, place)) in self._places

    def is_done(self, *place: object) -> bool:
        """Whether somebody has died here."""
        return self._file(*place).exists()

    def die_at(self, *place: object) -> None:
        """Die here if a test wants it and nobody has died at this place yet."""
        self.kill_at([os.getpid()], *place)

    def kill_at(self, pids: Sequence[int], *place: object) -> None:
        """Kill these processes, likewise."""
        if not self.is_wanted(*place):
            return
        try:
            self._file(*place).touch(exist_ok=False)
        except FileExistsError:
            return
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def pending(self, *kinds: str) -> list[str]:
        """Places of these kinds at which nobody has died yet."""
        return sorted(
            place for place in self._places if place.split(":")[0] in kinds and not self.is_done(place)
        )

    def _file(self, *place: object) -> Path:
        return self._folder / f"killed {':'.join(map(str, place))}"


def die_in_meetings(kills: Kills) -> None:
    """Have processes die while the ranks of a world meet.

    The places are ``meet:RANK:GENERATION:STAGE``, and ``join:STAGE`` for the first process that comes to a
    job that has begun. To be called before ``init()``.
    """

    class KilledMeeting(bootstrap._Meeting):
        def _exchange(self, stage: str, mine: object, meaning: str) -> list[object]:
            kills.die_at("meet", self._rank, self._generation, stage)
            if self._generation > 1 and not hasattr(KilledMeeting, "has_met"):
                kills.die_at("join", stage)
            answer = super()._exchange(stage, mine, meaning)
            if stage == "done":
                KilledMeeting.has_met = True  # type: ignore[attr-defined]
            return answer

    bootstrap._Meeting = KilledMeeting  # type: ignore[misc]
