"""Recovery times of elastic jobs on several hosts that lose a rank, a host or its cable, or one leaves.

Three network namespaces are the hosts, with an sshd each, and the launcher runs on the first. The machine's
monotonic clock is that of all.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.elastic_events import JobError, Log, Loss, World
from benchmarks.launchers import ROOT
from benchmarks.namespaces import namespaces

HOSTS = 3
#: In the order in which they are caused.
KINDS = ("rank", "agent", "notice", "cable")
FRAMEWORKS = ("numpy", "torch")
_MEGABYTES = 102  # of each state
#: No slot rests after a failure, and the job goes on however often it loses one.
_LIMITS = ("--blacklist-cooldown-range", "0", "0", "--reset-limit", "100000")


@dataclass(frozen=True)
class Hosts:
    """Namespaces, and polyhvdrun's options that reach them."""

    places: list[Any]
    options: list[str]


@contextlib.contextmanager
def hosts() -> Iterator[Hosts]:
    """Make three; raises CannotStart where that cannot be done."""
    with namespaces(HOSTS) as (made, options):
        yield Hosts(made, options)


class Cluster:
    """A job of three ranks, one on each host, whose second host has all the bad luck."""

    def __init__(self, among: Hosts, framework: str, megabytes: int, folder: Path, *, spare: bool) -> None:
        self.places, self.spares = among.places, HOSTS if spare else 0
        self._list, self._asked = folder / "hosts", folder / "asked"
        self.are(*range(HOSTS))
        discover = folder / "discover.sh"
        discover.write_text(f"#!/bin/sh\ncat '{self._list}'\necho >>'{self._asked}'\n")
        discover.chmod(0o755)
        self._done = folder / "done"
        command = [*self.places[0].command(), sys.executable, "-m", "polyhvd.launch", *among.options]
        command += ["--host-discovery-script", str(discover), *_LIMITS, "-np", str(HOSTS)]
        command += ["--min-np", str(HOSTS if spare else HOSTS - 1), "-x", "CUDA_VISIBLE_DEVICES=-1"]
        command += ["--spares", "1"] if spare else []
        program = [sys.executable, "-m", "benchmarks.elastic_hosts_rank", framework, str(megabytes)]
        self.log = Log(folder, [*command, *program, str(folder)], cwd=ROOT)

    def are(self, *numbers: int) -> None:
        """Have the discovery list these hosts."""
        names = ["localhost", *(place.address for place in self.places[1:])]
        new = self._list.with_suffix(".new")
        new.write_text("".join(f"{names[number]}:1\n" for number in numbers))
        new.rename(self._list)

    def cause(self, kind: str) -> Loss:
        """Wait until the job is at rest, cause something, and wait until it has gone on."""
        world = self.log.settled(HOSTS, self.spares)
        victim = self._victim(world)
        moment = time.monotonic()
        if kind == "rank":
            os.kill(victim, signal.SIGKILL)
        elif kind == "agent":
            os.kill(agent_of(victim), signal.SIGKILL)
        elif kind == "notice":
            os.kill(agent_of(victim), signal.SIGTERM)
        else:
            return self._cut(world, moment)
        loss = self.log.after(world, moment)
        if kind == "notice":  # it is used again when it has been listed again
            self.are(0, 2)
            self._is_heard()
            self.are(*range(HOSTS))
        return loss

    def _cut(self, world: World, moment: float) -> Loss:
        self.places[1].link("down")
        try:
            return self.log.after(world, moment)
        finally:
            self.places[1].link("up")

    def _victim(self, world: World) -> int:
        """The rank on the second host."""
        namespace = os.stat(f"/run/netns/{self.places[1].name}").st_ino
        (pid,) = (pid for pid, event in world.first.items() if event["host"] == f"net:[{namespace}]")
        return pid

    def _is_heard(self) -> None:
        times = self._asked.stat().st_size + 2  # one of them has begun after this
        self.log.wait(lambda: True if self._asked.stat().st_size >= times else None, "a run of the discovery")

    def finish(self) -> None:
        """Let the ranks end; raises JobError if the job does not end well."""
        self.log.settled(HOSTS)
        self._done.touch()
        deadline = time.monotonic() + 60
        while self.log.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        if self.log.process.returncode != 0:
            raise JobError(f"the job ended with {self.log.process.returncode}:\n{self.log.said()[-2000:]}")


def agent_of(pid: int) -> int:
    """The process that has started this one."""
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


def job(
    among: Hosts, framework: str, megabytes: int, wanted: dict[str, int], *, spare: bool = False
) -> dict[str, list[Loss]]:
    """Run one job, and cause so many events of each kind, in turns.

    Raises:
        JobError: it did not go on after one.
    """
    found: dict[str, list[Loss]] = {kind: [] for kind in wanted}
    with tempfile.TemporaryDirectory() as name:
        cluster = Cluster(among, framework, megabytes, Path(name), spare=spare)
        try:
            for number in range(max(wanted.values())):
                for kind in wanted:
                    if number < wanted[kind]:
                        found[kind].append(cluster.cause(kind))
            cluster.finish()
        finally:
            cluster.log.close()
    return found


def rows(rounds: int) -> Iterator[tuple[str, list[float]]]:
    """Lines of the table with milliseconds; raises CannotStart where no hosts can be made."""
    with hosts() as among:
        for framework in FRAMEWORKS:
            (with_spare,) = job(among, framework, _MEGABYTES, {"rank": rounds}, spare=True).values()
            name = f"{framework}, {HOSTS} hosts"
            yield f"{name}: kill -9 of a rank elsewhere, error", [loss.error for loss in with_spare]
            yield f"{name}: from the kill to the first new step, a spare", [loss.step for loss in with_spare]
            wanted = dict.fromkeys(KINDS, rounds)
            if framework != FRAMEWORKS[0]:
                del wanted["cable"]  # what it costs is the time until it is noticed, in any framework
            found = job(among, framework, _MEGABYTES, wanted)
            for kind, what in (
                ("rank", "the same without a spare"),
                ("agent", "kill -9 of a host's agent"),
                ("cable", "a host's cable is cut"),
            ):
                if kind not in found:
                    continue
                if kind != "rank":
                    yield f"{name}: {what}, error", [loss.error for loss in found[kind]]
                yield f"{name}: {what}, to the first new step", [loss.step for loss in found[kind]]
            left = found["notice"]
            yield f"{name}: pause of the others when a host leaves", [loss.pause for loss in left]
            yield f"{name}: steps lost by that (number)", [float(loss.steps_lost) for loss in left]
