"""Events of ranks of jobs that lose processes, read while they run.

Ranks append lines to one file (:class:`benchmarks.elastic_rank.Events`); whoever ends a process of theirs
reads here who there is, and afterwards how long the others took.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Event = dict[str, Any]
T = TypeVar("T")

#: Nothing that is measured takes as long, not Horovod's and Ray's starts either.
_TIMEOUT_S = 120.0
#: From the last change to the next loss: what a new process does in the background has been done by then.
CALM_S = 1.0


class JobError(Exception):
    """A job has ended or does not go on."""


@dataclass(frozen=True)
class World:
    """The ranks of one generation that have all begun a step: by pid, the event of the first one of each."""

    number: int
    first: dict[int, Event]

    @property
    def begun(self) -> float:
        """The time at which the last rank began its first step."""
        return max(event["at"] for event in self.first.values())


@dataclass(frozen=True)
class Loss:
    """Milliseconds of one event."""

    error: float  #: until the last survivor's script has the error; 0 if no script has had one
    step: float  #: from the event until all ranks of the next world have begun a step
    pause: float  #: the longest time from an interrupt of a rank that stays to its next step
    steps_lost: int  #: between the last step that a survivor had begun and the first of the next world


class Log:
    """The events of one job, which is killed when this is closed.

    Args:
        folder: with the file ``events``.
        command: that starts the job.
        options: for Popen.
    """

    def __init__(self, folder: Path, command: list[str], **options: Any) -> None:
        self._path, self._position = folder / "events", 0
        self.events: list[Event] = []
        self._said = folder / "said"
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True, **options
            )

    def close(self) -> None:
        """End the job, by kill -9 if SIGTERM does not do."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        with contextlib.suppress(ProcessLookupError):  # what it has left of its group
            os.killpg(self.process.pid, signal.SIGKILL)
        self.read()
        for pid in {event["pid"] for event in self.events if _is_there(event)}:
            with contextlib.suppress(OSError):  # whose number may be another process's by now
                if str(self._path.parent) in Path(f"/proc/{pid}/cmdline").read_text():
                    os.kill(pid, signal.SIGKILL)

    def read(self) -> list[Event]:
        """Take in what has been noted meanwhile."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._position)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._position += len(whole)
            self.events += [json.loads(line) for line in whole.splitlines()]
        return self.events

    def wait(self, found: Callable[[], T | None], what: str) -> T:
        """Wait until there is something; raises JobError when the job has ended, or nothing comes."""
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            self.read()
            if (value := found()) is not None:
                return value
            if self.process.poll() is not None or time.monotonic() > deadline:
                ended = self.process.poll()
                why = "does not come" if ended is None else f"did not come: the job ended with {ended}"
                raise JobError(f"{what} {why}:\n{self.said()[-2000:]}")
            time.sleep(0.02)

    def said(self) -> str:
        """The job's output."""
        return self._said.read_text("utf-8", "replace")

    def worlds(self, since: float = 0.0, former: int = -1) -> Iterator[World]:
        """The worlds that came after one, as far as all of their ranks have begun a step since then."""
        found: dict[int, dict[int, Event]] = {}
        for event in self.events:
            if event["event"] == "step" and event["at"] >= since and event["world"] > former:
                found.setdefault(event["world"], {}).setdefault(event["pid"], event)
        for number, first in sorted(found.items()):
            if len(first) >= next(iter(first.values()))["size"]:
                yield World(number, first)

    def settled(self, size: int, spares: int = 0) -> World:
        """Wait for a world of this size, all of whose ranks live, with so many that wait to join."""

        def found() -> World | None:
            newest = max((e["world"] for e in self.events if e["event"] == "step"), default=-1)
            for world in self.worlds(former=newest - 1):
                ready = {e["pid"]: e for e in self.events if e["event"] == "ready"}
                waiting = [e for pid, e in ready.items() if pid not in world.first and _is_there(e)]
                last = max([world.begun, *(e["at"] for e in waiting)])
                if (
                    len(world.first) == size
                    and len(waiting) >= spares
                    and all(map(_is_there, world.first.values()))
                    and time.monotonic() > last + CALM_S
                ):
                    return world
            return None

        return self.wait(found, f"a world of {size} ranks with {spares} spares")

    def after(self, former: World, moment: float) -> Loss:
        """Wait until the next world goes on; what the event at this moment has cost."""
        world = self.wait(lambda: next(self.worlds(moment, former.number), None), "the next world")
        stayed = [pid for pid in world.first if pid in former.first]
        last: dict[str, dict[int, Event]] = {"error": {}, "interrupt": {}, "step": {}}
        for event in self.events:
            pid = event["pid"]
            if pid in stayed and event["event"] in last and event["at"] < world.first[pid]["at"]:
                last[event["event"]][pid] = event
        errors = [event["at"] for event in last["error"].values() if event["at"] >= moment]
        pauses = [
            world.first[pid]["at"] - event["at"]
            for pid, event in last["interrupt"].items()
            if event["at"] >= moment
        ]
        begun = max((event["step"] for event in last["step"].values()), default=0)
        first = next(iter(world.first.values()))["step"]
        return Loss(
            error=1e3 * (max(errors, default=moment) - moment),
            step=1e3 * (world.begun - moment),
            pause=1e3 * max(pauses, default=0.0),
            steps_lost=max(0, begun + (0 if errors or not pauses else 1) - first),
        )


def _is_there(event: Event) -> bool:
    """Return whether the process that noted it lives."""
    try:
        state = Path(f"/proc/{event['pid']}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return state[0] not in (b"Z", b"X")
