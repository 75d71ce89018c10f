"""How long elastic jobs take to go on after the loss of a process: ``python -m benchmarks --only elastic``.

Real jobs of three ranks on this host, in which one after the other is killed with SIGKILL. A rank notes when
an error reaches its training function and when a step begins (:mod:`benchmarks.elastic_rank`); this reads
what all have noted.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import elastic_hosts, elastic_peers
from benchmarks.elastic_rank import JOBS
from benchmarks.launchers import ROOT, CannotStart

RANKS = 3
_TIMEOUT_S = 600.0
_SETTLED_S = 0.5  # until a process that holds its state is at rest

Event = dict[str, Any]


@dataclass
class Losses:
    """Milliseconds of each loss: the last survivor's error after the kill, and the first step after that."""

    errors: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  #: until the last rank begins its first new step
    pauses: list[float] = field(default_factory=list)  #: of the others, for each new process


def losses_of(events: Sequence[Event], ranks_after: int) -> Losses:
    """Read what ranks have noted.

    Args:
        events: of one job.
        ranks_after: how many ranks the first world after a loss has.
    """
    ordered = sorted(events, key=lambda event: float(event["at"]))
    found = Losses()
    kills = [i for i, event in enumerate(ordered) if event["event"] == "kill"]
    for number, begin in enumerate(kills):
        end = kills[number + 1] if number + 1 < len(kills) else len(ordered)
        after = ordered[begin + 1 : end]
        killed_at = ordered[begin]["at"]
        errors: list[int] = []
        for place, event in enumerate(after):
            if event["event"] == "error":
                errors.append(place)
            elif event["event"] == "step" and event["pid"] in {after[i]["pid"] for i in errors}:
                break  # it has gone on; ranks that come to the end of the job later have errors, too
        if not errors:
            continue
        error_at = after[errors[-1]]["at"]
        first: dict[int, float] = {}
        for event in after[errors[-1] :]:
            if event["event"] == "step" and event["size"] == ranks_after:
                first.setdefault(event["pid"], event["at"])
        if len(first) < ranks_after:
            continue  # two losses at once, or the job has ended
        found.errors.append(1e3 * (error_at - killed_at))
        found.steps.append(1e3 * (sorted(first.values())[ranks_after - 1] - error_at))
    found.pauses = pauses_of(ordered)
    return found


def pauses_of(events: Sequence[Event]) -> list[float]:
    """Milliseconds from the interrupt to the next step, the longest of the ranks that stay at each change.

    Raises RuntimeError where that step is not the one that follows the last one before the interrupt.
    """
    pauses: list[list[float]] = []
    waiting: dict[int, Event] = {}
    steps: dict[int, int] = {}  # the last of each process
    for event in sorted(events, key=lambda event: float(event["at"])):
        pid = event["pid"]
        if event["event"] == "interrupt":
            if not waiting:
                pauses.append([])
            waiting[pid] = event
        elif event["event"] == "step":
            if (interrupt := waiting.pop(pid, None)) is not None:
                if event["step"] != steps[pid] + 1:
                    raise RuntimeError(f"after step {steps[pid]} and an interrupt came step {event['step']}")
                pauses[-1].append(1e3 * (event["at"] - interrupt["at"]))
            steps[pid] = event["step"]
        elif event["event"] == "left":
            waiting.pop(pid, None)
    return [max(some) for some in pauses if some]


def job(framework: str, megabytes: int, kills: int, *, spare: bool) -> Losses:
    """Run a job, and kill ranks of it."""
    least = RANKS if spare else RANKS - 1
    options = ["-np", str(RANKS), "--min-np", str(least), "--reset-limit", "100000"]
    options += ["--spares", "1"] if spare else []
    options += ["-x", f"BENCH_ELASTIC_SIZE={RANKS}", "-x", f"BENCH_ELASTIC_SPARES={int(spare)}"]
    return losses_of(_events(options, framework, str(megabytes), "kill", str(kills)), least)


def leaves(framework: str, megabytes: int, number: int) -> list[float]:
    """Milliseconds of pauses in jobs of four, of which two leave with notice, one after the other."""
    pauses: list[float] = []
    while len(pauses) < number:
        events = _events(["-np", "4", "--min-np", "2"], framework, str(megabytes), "leave", "2")
        found = pauses_of(events)
        if len(found) != 2:
            raise RuntimeError(f"two ranks were to leave, and {len(found)} have")
        pauses += found
    return pauses


def floor(framework: str, megabytes: int, rounds: int) -> list[float]:
    """Milliseconds from SIGKILL of a process with as much memory to the end of file at its pipe.

    The kernel frees the memory first: survivors on other hosts, which detect a death by a closed connection,
    notice it about as late.
    """
    program = [sys.executable, "-m", "benchmarks.elastic_rank", framework, str(megabytes), "hold"]
    found: list[float] = []
    for _ in range(rounds):
        process = subprocess.Popen(program, cwd=ROOT, env=_environment(), stdout=subprocess.PIPE)
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line != b"holds\n":
            pass
        time.sleep(_SETTLED_S)
        began = time.monotonic()
        process.kill()
        process.stdout.read()
        found.append(1e3 * (time.monotonic() - began))
        if process.wait() != -signal.SIGKILL:
            raise RuntimeError(f"{' '.join(program)} ended by itself, with {process.returncode}")
        process.stdout.close()
    return found


def _environment() -> dict[str, str]:
    return {**os.environ, "POLYHVD_ALONE": "1", "CUDA_VISIBLE_DEVICES": "-1"}


def _events(options: Sequence[str], *arguments: str) -> list[Event]:
    """Run a job of :mod:`benchmarks.elastic_rank`, and read what its ranks have noted."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m", "polyhvd.launch", *options, "-x", "CUDA_VISIBLE_DEVICES=-1"]
        _run(launcher, [sys.executable, "-m", "benchmarks.elastic_rank", *arguments, folder])
        return _read(folder)


def commits(rounds: int) -> dict[str, list[float]]:
    """Milliseconds of commits of 205 MB, and of copies of as many bytes."""
    done = _run([sys.executable, "-m", "benchmarks.elastic_rank", "commits"], [str(rounds)])
    found = json.loads(done.splitlines()[-1])
    return {name: [1e3 * value for value in values] for name, values in found.items()}


def _run(command: list[str], arguments: list[str]) -> str:
    done = subprocess.run(
        [*command, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


def _read(folder: str) -> list[Event]:
    return [json.loads(line) for line in (Path(folder) / "events").read_text().splitlines()]


def row(label: str, values: Sequence[float]) -> str:
    """A line of the table: median, least and most, and how many."""
    if not values:
        return f"| {label} | none was seen | | 0 |"
    spread = f"{min(values):.0f} to {max(values):.0f}"
    return f"| {label} | {statistics.median(values):.0f} | {spread} | {len(values)} |"


#: The parts that can be run separately.
PARTS = ("own", "hosts", "peers")


def main(folder: Path, *, quick: bool = False, parts: Sequence[str] = PARTS) -> int:
    """Measure everything or some parts, print the table, and write elastic.md and elastic.json."""
    kills = 3 if quick else 20
    lines = ["# Elastic jobs", "", "Milliseconds: median, least to most, number.", ""]
    lines += [f"{RANKS} ranks on one host, a state of 102 MB in 161 tensors, kill -9 of one rank.", ""]
    lines += ["| event | median | spread | of |", "|---|---:|---:|---:|"]
    kept: dict[str, list[float]] = {}

    def add(label: str, values: Sequence[float]) -> None:
        kept[label] = list(values)
        lines.append(row(label, values))
        print(lines[-1], flush=True)

    print("\n".join(lines), flush=True)
    for framework in JOBS if "own" in parts else ():
        with_spare = job(framework, 102, kills, spare=True)
        add(f"{framework}: the floor: end of file at a killed process's pipe", floor(framework, 102, 5))
        add(f"{framework}: error in the last survivor's script", with_spare.errors)
        add(f"{framework}: from there to the first new step, a spare", with_spare.steps)
        shrunk = job(framework, 102, kills, spare=False)
        add(f"{framework}: the same without a spare", shrunk.steps)
        add(f"{framework}: pause of the others for a new process", shrunk.pauses)
        left = leaves(framework, 102, kills)
        add(f"{framework}: pause of the others when one leaves with notice", left)
    for name, values in commits(kills).items() if "own" in parts else ():
        what = "commit of 205 MB (ResNet-50 and momentum)" if name == "commit" else "a copy of as many bytes"
        add(f"torch: {what}", values)
    notes: list[str] = []
    try:
        for label, values in elastic_hosts.rows(kills) if "hosts" in parts else ():
            add(label, values)
    except CannotStart as error:
        notes.append(f"- several hosts: not measured: {error}")
    for label, values, note in elastic_peers.rows(max(3, kills // 2)) if "peers" in parts else ():
        add(label, values)
        notes.append(f"- {label}: {note}")
    if notes:
        print("\n".join(["", *notes]), flush=True)
        lines += ["", *notes]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "elastic.md").write_text("\n".join(lines) + "\n")
    (folder / "elastic.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0
