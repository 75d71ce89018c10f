"""How long starting a job takes: ``python -m benchmarks --only launch``.

What polyhvdrun adds to two bare interpreters, both measured in turns; and, where eight hosts can be made of
namespaces, how soon after the last of 64 ranks has imported everything all of them are in. Modules are
compiled before, as an installation does it. If the machine has other work, its load is printed; --priority
raises the priority of the measured processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.launchers import ROOT, CannotStart
from benchmarks.namespaces import namespaces

HOSTS = 8
RANKS = 64
_TIMEOUT_S = 300.0

#: Says when it had imported everything, and when it was in.
ENTERING = """
import time
import polyhvd.numpy as hvd
imported = time.time()
hvd.init()
print("times", imported, time.time(), flush=True)
hvd.barrier()
"""

Times = dict[str, list[float]]


@dataclass(frozen=True)
class Pair:
    """Two ways that take turns, and milliseconds of each start."""

    bare: list[float]
    polyhvdrun: list[float]

    @property
    def added(self) -> list[float]:
        """The time by which polyhvdrun was slower than the bare start, in each turn."""
        return [one - other for one, other in zip(self.polyhvdrun, self.bare, strict=True)]


def polyhvdrun() -> list[str]:
    """The command as users have it, beside this Python."""
    beside = Path(sys.executable).with_name("polyhvdrun")
    return [str(beside)] if beside.exists() else [sys.executable, "-m", "polyhvd.launch"]


def starts(rounds: int) -> Pair:
    """Two interpreters that do nothing, bare and by polyhvdrun, in turns; the first turn does not count."""
    nothing = [sys.executable, "-c", "pass"]
    pair = Pair([], [])
    for number in range(rounds + 1):
        ways: list[tuple[list[float], Callable[[], float]]] = [
            (pair.bare, lambda: _run([nothing, nothing])),
            (pair.polyhvdrun, lambda: _run([[*polyhvdrun(), "-np", "2", *nothing]])),
        ]
        for kept, run in ways if number % 2 else reversed(ways):
            taken_ms = run()
            if number:
                kept.append(taken_ms)
    return pair


def _run(commands: Sequence[Sequence[str]]) -> float:
    begin = time.perf_counter()
    running = [
        subprocess.Popen(command, cwd=ROOT, env=_environment(), stdin=subprocess.DEVNULL)
        for command in commands
    ]
    statuses = [_status(process) for process in running]
    taken_ms = 1e3 * (time.perf_counter() - begin)
    if any(statuses):
        raise RuntimeError(f"{' '.join(commands[0])} ended with {max(statuses)}")
    return taken_ms


def _status(process: subprocess.Popen[bytes]) -> int:
    """Wait for its end; Popen.wait with a time limit would look for it every 50 ms."""
    descriptor = os.pidfd_open(process.pid)
    try:
        if not select.select([descriptor], [], [], _TIMEOUT_S)[0]:
            process.kill()
        return process.wait()
    finally:
        os.close(descriptor)


def _environment() -> dict[str, str]:
    """In which Python keeps what it has compiled."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def entries(rounds: int) -> list[float]:
    """Milliseconds from the last import of 64 ranks on eight hosts until all are in; raises CannotStart."""
    with _hosts() as (before, options):
        return [entry(before, options) for _ in range(rounds)]


@contextlib.contextmanager
def _hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Eight hosts: words that run a command on the first, and polyhvdrun's options for ranks on all."""
    with namespaces(HOSTS) as (made, options):
        listed = ",".join(f"{host.address}:{RANKS // HOSTS}" for host in made)
        yield made[0].command(), [*options, "-H", listed]


def entry(before: Sequence[str], options: Sequence[str]) -> float:
    """Start a job there, and read the output of its ranks."""
    patient = ["--start-timeout", "200", "--no-tag"]
    command = [*before, *polyhvdrun(), *options, *patient, sys.executable, "-c", ENTERING]
    done = subprocess.run(
        command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=_TIMEOUT_S
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return entry_ms(done.stdout)


def entry_ms(said: str) -> float:
    """From the last rank's import to the last one's return from init(), in milliseconds."""
    times = [[float(word) for word in line.split()[1:]] for line in said.splitlines() if line[:6] == "times "]
    return 1e3 * (max(into for _, into in times) - max(imported for imported, _ in times))


def row(label: str, values: Sequence[float]) -> str:
    """A line of the table: median, quartiles, least and most, and how many."""
    middle = statistics.quantiles(values, n=4) if len(values) > 1 else [values[0]] * 3
    spread = f"{middle[0]:.0f} to {middle[2]:.0f} | {min(values):.0f} to {max(values):.0f}"
    return f"| {label} | {statistics.median(values):.0f} | {spread} | {len(values)} |"


def main(folder: Path, *, quick: bool = False, priority: bool = False) -> int:
    """Measure both, print the table, and write launch.md and launch.json."""
    if priority:  # of real time: nice counts within a session only
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    lines = ["# Starting jobs", ""]
    lines += ["Milliseconds: median, quartiles, least to most, number.", ""]
    kept: Times = {}

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    def add(label: str, values: Sequence[float]) -> None:
        kept[label] = list(values)
        say(row(label, values))

    print("\n".join(lines), flush=True)
    say(f"{os.cpu_count()} cores, load {_load()} at the beginning.")
    if priority:
        say("What was measured had priority over the machine's other processes.")
    say("")
    say("| event | median | quartiles | all | of |")
    say("|---|---:|---:|---:|---:|")
    pair = starts(8 if quick else 30)
    add("two bare interpreters", pair.bare)
    add("polyhvdrun -np 2 python -c pass", pair.polyhvdrun)
    add("what it adds, turn by turn", pair.added)
    try:
        add(f"{RANKS} ranks on {HOSTS} hosts: last import to all in", entries(2 if quick else 8))
    except CannotStart as error:
        say("")
        say(f"Without {RANKS} ranks on {HOSTS} hosts: {error}.")
    say("")
    say(f"Load {_load()} at the end.")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "launch.md").write_text("\n".join(lines) + "\n")
    (folder / "launch.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0


def _load() -> str:
    return f"{os.getloadavg()[0]:.1f}"
