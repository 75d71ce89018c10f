"""Elastic jobs whose processes are killed from outside, at any moment, for as long as one likes.

``make soak`` runs it: SOAK_KILLS kills in jobs of at most a hundred, SOAK_FRAMEWORK, SOAK_SEED. Each job has
a seed of its own, which chooses its victims and its moments; what fails says how to have that job again.
Some kills come while the launcher is stopped, while the hosts have fewer slots, or while the ranks meet after
another one; agents receive SIGTERM; and half of the jobs have collectives before they train.
A job has to end in good order, every row of every epoch has to be in its weights once, by its own count and
by what its ranks have written down; its weights have to be, bit for bit, those of a job without failures
that makes the same history of sizes; neither ranks nor launcher may grow; and
no process may be left.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE, STDOUT, Popen
from typing import Any

import numpy as np
from soak_model import INTEGERS, advanced, integers

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "harness"))
import netns  # noqa: E402
import sshd  # noqa: E402
from ranks_alive import is_running  # noqa: E402

JOB = str(Path(__file__).with_name("soak_job.py"))
PHASES = ("starts", "waits for a place", "meets", "in a step", "commits", "is done", "in the prologue")
MEMBERS_MAX = 1 << 14
KILLS_MAX = 100  # in a job
ROWS = 600
#: Ranks make steps while a new process starts, which takes seconds where a framework is imported, and up to
#: 480 while hosts have fewer slots. The training must not end before the last kill.
STEPS_PER_KILL = {"numpy": 80, "torch": 150, "mxnet": 150, "tensorflow": 240, "keras": 240}
HANG_S = 120.0
END_S = 300.0
#: Kills in a row that wait for no recovery: the job ends at ten worlds in which nobody has got anywhere.
BLIND_MAX = 6
#: How long the launcher is stopped, for which agents and ranks have to wait.
STOPPED_S = 5.0
#: What a process may have grown by at its end.
DESCRIPTORS_MAX, THREADS_MAX, MEMORY_MAX = 2, 2, 24 << 20
MEASURES = ("memory", "threads", "descriptors")
LIMITS = ("--blacklist-cooldown-range", "0", "0", "--elastic-timeout", "120", "--heartbeat-timeout-s", "15")
LIMITS += ("--on-state-lost", "restart")  # where all are killed before the first checkpoint
#: By name: options, slots, the mode of the job, and whether all worlds have one size.
FORMS = {
    "sizes": (("-np", "3", "--min-np", "1", "--max-np", "4", *LIMITS), 4, "train", False),
    "spare": (("-np", "3", "--min-np", "2", "--max-np", "4", "--spares", "1", *LIMITS), 4, "train", False),
    "one size": (("-np", "3", "--min-np", "3", "--spares", "1", *LIMITS), 3, "train", True),
    "run": (("-np", "3", "--min-np", "3", "--spares", "1", *LIMITS), 3, "run", True),
    "files": (("-np", "3", "--min-np", "1", "--max-np", "4", *LIMITS), 4, "train", False),
    "two": (("-np", "2", "--min-np", "2", "--spares", "1", *LIMITS), 2, "train", True),
}
NUMPY_FORMS = ("sizes", "one size", "spare", "run")
#: By name: what the environment of the job has beside.
ENVIRONMENTS = {"files": {"TRAIN_DATA": "parquet"}}


class SoakError(Exception):
    """A job has not ended as it must."""


@dataclass
class Kill:
    """What was done."""

    kind: str
    moment: float
    generation: int
    phases: list[str]
    blind: bool  # without waiting for the recovery from the one before
    during: str = ""  # what else was going on


@dataclass
class Use:
    """What a process has in use, with the size of its world; of the launcher, with how many it has."""

    size: int
    memory: int
    threads: int
    descriptors: int

    def __str__(self) -> str:
        return f"{self.memory >> 10} KiB, {self.threads} threads, {self.descriptors} descriptors"


def use_of(pid: int, size: int) -> Use | None:
    """None: it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    found = dict(re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE))
    if len(found) < 2:
        return None
    return Use(size, int(found["VmRSS"]) << 10, int(found["Threads"]), descriptors)


def growth(uses: list[Use]) -> Use | None:
    """By how much the second half is above the first, beside the same size; None: too few to say."""
    size, _ = Counter(use.size for use in uses).most_common(1)[0] if uses else (0, 0)
    same = [use for use in uses[2:] if use.size == size]
    if len(same) < 8:
        return None
    first, last = same[: len(same) // 2], same[len(same) // 2 :]

    def by(name: str) -> int:
        values = [[getattr(use, name) for use in part] for part in (first, last)]
        return int(statistics.median(values[1]) - statistics.median(values[0]))

    return Use(size, *(by(name) for name in MEASURES))


@dataclass
class Job:
    """One job and its killer. A context manager: nothing of it is left."""

    framework: str
    seed: int
    kills: int
    form: str
    folder: Path
    options: tuple[str, ...] = ()
    hosts: dict[str, int] = field(default_factory=dict)  # slots of each
    before: tuple[str, ...] = ()  # words of a command that runs it
    done: list[Kill] = field(default_factory=list)
    uses: dict[int, list[Use]] = field(default_factory=lambda: defaultdict(list))
    launcher_uses: list[Use] = field(default_factory=list)
    killed: int = 0
    agents_ended: int = 0

    def __post_init__(self) -> None:
        options, slots, self.how, self.is_of_one_size = FORMS.get(self.form, ((), 0, "train", False))
        self.hosts = self.hosts or {"localhost": slots}
        self.hosts_file = self.folder / "hosts"
        self.list_hosts(self.hosts)
        self.options = (*(self.options or options), "--hostfile", str(self.hosts_file))
        self.chance = random.Random(f"{self.seed} {self.framework} {self.form}")
        steps = STEPS_PER_KILL.get(self.framework, 15)
        self.epochs = max(2, -(-self.kills * steps * 12 // ROWS))
        self.table = np.memmap(self.folder / "table", np.int64, "w+", shape=(MEMBERS_MAX, 5))
        self.table[:, 1] = -1
        self.allowed = np.memmap(self.folder / "allowed", np.int64, "w+", shape=(1,))
        #: In half of the jobs there is a process that is killed seldom, and so sees many worlds.
        self.spares_one = self.chance.random() < 0.5
        self.spared: int | None = None
        self.has_prologue = self.chance.random() < 0.5
        self.first_steps: dict[int, int] = {}  # of each generation, as they were seen
        self.process: Popen[bytes] | None = None
        self.said = b""

    # Running

    def start(self, *options: str, **environment: str) -> Popen[bytes]:
        """Start polyhvdrun."""
        environment = {"SOAK_HOW": self.how, **ENVIRONMENTS.get(self.form, {}), **environment}
        environment |= {"SOAK_EPOCHS": str(self.epochs), "TRAIN_ROWS": str(ROWS), "OMP_NUM_THREADS": "1"}
        environment |= {"SOAK_PROLOGUE": "1"} if self.has_prologue else {}
        environment |= {"POLYHVD_FLIGHT_DIR": str(self.folder), "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [*self.before, sys.executable, "-m", "polyhvd.launch", *options]
        for name, value in environment.items():
            command += ["-x", f"{name}={value}"] if self.before else []
        command += [sys.executable, JOB, self.framework, str(self.folder)]
        return Popen(
            command, cwd=ROOT, env={**os.environ, **environment}, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT
        )

    def go(self) -> None:
        """Run it with kills, and look at how it has ended; raises SoakError."""
        exact = {"SOAK_MODEL": "exact"} if self.before else {}
        self.process = self.start(*self.options, **exact)
        reader = threading.Thread(target=self._read, args=(self.process,), daemon=True)
        reader.start()
        try:
            self._kill_all_of_them()
            self.allowed[0] = 1 << 60
            if self.chance.random() < 0.25:
                with self._stopped_launcher():  # the ranks finish
                    pass
            self._wait_for(lambda: self._status() is not None, "the end of the job", END_S)
            reader.join(10)
        except SoakError as error:
            raise SoakError(f"{error}\n{self._state()}") from None
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()
        self._judge()

    def _read(self, process: Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self.said += line

    def _status(self) -> int | None:
        assert self.process is not None
        return self.process.poll()

    def _wait_for(self, condition: Any, what: str, limit_s: float = HANG_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            if self._status() not in (None, 0):
                raise SoakError(f"the job has ended with status {self._status()}")
            if time.monotonic() > deadline:
                raise SoakError(f"not within {limit_s:.0f} s: {what}")
            time.sleep(0.002)

    # Killing

    def members(self) -> dict[int, Any]:
        """Rows of the table of those that live."""
        used = np.flatnonzero(self.table[:, 0])
        return {int(m): self.table[m].copy() for m in used if is_running(int(self.table[m, 0]))}

    def world(self, members: dict[int, Any]) -> list[int]:
        """The members of the last generation that has made a step, by rank."""
        last = max((row[1] for row in members.values()), default=0)
        return sorted((m for m, row in members.items() if row[1] == last > 0), key=lambda m: members[m][2])

    def _kill_all_of_them(self) -> None:
        blind, broken = 0, 0  # the generation whose loss is not recovered from
        while self.killed < self.kills and self._status() is None:
            due = self.epochs * ROWS * (self.killed + 1) // (self.kills + 1)
            self.allowed[0] = max(due, self.allowed[0])
            is_blind = bool(self.done) and blind < BLIND_MAX and self.chance.random() < 0.35
            blind = blind + 1 if is_blind else 0
            if is_blind:
                time.sleep(self.chance.uniform(0.0, 0.6))
                broken = max(broken, self._kill_some(is_blind=True))
                continue
            self._wait_for(lambda: self._goes_on_after(broken), f"a step after generation {broken}")  # noqa: B023
            self._look()
            time.sleep(self.chance.uniform(0.0, 0.3))
            event = self.chance.random()
            if event < 0.06:
                with self._stopped_launcher():
                    broken = max(broken, self._kill_some(during="while the launcher is stopped"))
            elif event < 0.14:
                with self._fewer_slots():
                    broken = max(broken, self._kill_some(during="with fewer slots"))
            elif event < 0.26 and (former := self._kill_some()):
                phase = self.chance.choice(("waits for a place", "meets"))
                delay_s = self.chance.uniform(0.0, 0.02)
                self.allowed[0] += 24  # survivors see the loss in a step
                self._wait_for(lambda: self._meet_after(former, phase), "the ranks meet")  # noqa: B023
                time.sleep(delay_s)
                broken = max(former, self._kill_some(is_blind=True, during="while the ranks meet"))
            elif event < 0.34 and self.before:
                self._end_an_agent()
            else:
                broken = max(broken, self._kill_some())

    def _kill_some(self, *, is_blind: bool = False, during: str = "") -> int:
        """Returns the generation that was broken; 0: none."""
        members = self.members()
        if any(PHASES[row[4]] == "is done" for row in members.values()):
            raise SoakError(f"the training has ended after {self.killed} of {self.kills} kills")
        kind, pids = self._victims(members)
        numbers = {int(row[0]): m for m, row in members.items()}
        phases = [PHASES[members[numbers[pid]][4]] if pid in numbers else "an agent" for pid in pids]
        generation = self._generation()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not pids:
            return 0
        self.killed += len(pids)
        self.done.append(Kill(kind, time.time(), generation, phases, is_blind, during))
        is_broken = {int(members[m][0]) for m in self.world(members)} & set(pids)
        return generation if is_broken or kind in ("an agent", "a host") else 0

    def _meet_after(self, broken: int, phase: str) -> bool:
        """Whether a survivor of a generation has come to a phase, or is over it."""
        survivors = [row for row in self.members().values() if row[1] == broken]
        return any(PHASES[row[4]] == phase for row in survivors) or self._generation() > broken

    # What else goes on

    @contextlib.contextmanager
    def _stopped_launcher(self) -> Iterator[None]:
        """The launcher is stopped for a while, in which ranks make steps."""
        assert self.process is not None
        self.allowed[0] += 36
        self.process.send_signal(signal.SIGSTOP)
        until = time.monotonic() + STOPPED_S
        try:
            time.sleep(self.chance.uniform(0.0, 0.5))
            yield
            time.sleep(max(0.0, until - time.monotonic()))
        finally:
            self.process.send_signal(signal.SIGCONT)

    @contextlib.contextmanager
    def _fewer_slots(self) -> Iterator[None]:
        """The discovery finds fewer slots for a while, maybe fewer than --min-np."""
        fewer = dict(self.hosts)
        host = self.chance.choice(sorted(fewer))
        fewer[host] -= self.chance.randint(1, fewer[host])
        self.list_hosts(fewer)
        self._make_steps(self.chance.uniform(0.0, 2.0))
        yield
        self._make_steps(self.chance.uniform(0.0, 2.0))
        self.list_hosts(self.hosts)

    def _end_an_agent(self) -> None:
        """An agent receives SIGTERM, so that the ranks of its host leave; then the host comes back."""
        members = self.members()
        world = {int(members[m][0]) for m in self.world(members)}
        agents = {agent: below for agent, below in self._agents(members).items() if world - set(below)}
        if not agents:
            return
        agent = self.chance.choice(sorted(agents))
        below = agents[agent]
        addresses = Path(f"/proc/{agent}/net/fib_trie").read_text()
        name = next((host for host in self.hosts if f" {host}\n" in addresses), "localhost")
        os.kill(agent, signal.SIGTERM)
        self.agents_ended += 1

        def has_ended() -> bool:
            self._make_steps(0.05)
            return not any(map(is_running, [agent, *below]))

        self._wait_for(has_ended, f"the end of the agent {agent} and of its ranks")
        self.list_hosts({host: slots for host, slots in self.hosts.items() if host != name})
        self._make_steps(2.5)
        self.list_hosts(self.hosts)

    def _make_steps(self, seconds: float) -> None:
        """Let ranks make steps for a while."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.allowed[0] += 12
            time.sleep(0.1)

    def list_hosts(self, hosts: dict[str, int]) -> None:
        """What the discovery finds."""
        new = self.folder / "hosts.new"
        new.write_text("".join(f"{host} slots={slots}\n" for host, slots in hosts.items() if slots))
        new.rename(self.hosts_file)

    # Victims

    def _goes_on_after(self, broken: int) -> bool:
        """Whether a later world has made a step, so that what comes next is no failure that recurs."""
        self.allowed[0] += 12  # newcomers are let in at the end of a step
        time.sleep(0.03)
        generation = self._generation()
        step = int(self.table[self.table[:, 1] == generation, 3].max())
        first = self.first_steps.setdefault(generation, step)
        return (generation > broken and step > first) or self._status() is not None

    def _generation(self) -> int:
        return int(self.table[:, 1].max())

    def _victims(self, members: dict[int, Any]) -> tuple[str, list[int]]:
        """Whom to kill, and how that is called."""
        world = self.world(members)
        others = [m for m in members if m not in world]
        if self.spares_one and world and self.spared not in world:
            self.spared = self.chance.choice(world)
        may_be_all = self.how == "train" and not self.spares_one
        kind = self.chance.choices(
            ["a rank", "rank 0", "a newcomer or spare", "all but one", "all", "an agent", "a host"],
            [8, 3, 3, 2, 0.4 * may_be_all, 3 * bool(self.before), 2 * bool(self.before)],
        )[0]
        pick = self.chance.random()
        if kind == "a rank" and world:
            chosen = [world[int(pick * len(world))]]
        elif kind == "rank 0" and world:
            chosen = world[:1]
        elif kind == "a newcomer or spare" and others:
            chosen = [others[int(pick * len(others))]]
        elif kind == "all but one" and len(world) > 1:
            kept = world[int(pick * len(world))] if self.spared not in world else self.spared
            chosen = [m for m in world if m != kept]
        elif kind == "all":
            chosen = list(members)
        elif kind in ("an agent", "a host"):
            return kind, self._of_an_agent(members, pick, host=kind == "a host")
        else:
            return kind, []
        if kind != "all" and self.spared in chosen and self.chance.random() < 0.99:
            return kind, []
        return kind, [int(members[m][0]) for m in chosen]

    def _of_an_agent(self, members: dict[int, Any], pick: float, *, host: bool) -> list[int]:
        agents = self._agents(members)
        if not agents:
            return []
        agent = sorted(agents)[int(pick * len(agents))]
        return [agent, *agents[agent]] if host else [agent]

    def _agents(self, members: dict[int, Any]) -> dict[int, list[int]]:
        """Agents of other hosts, and the ranks below each."""
        below: dict[int, list[int]] = defaultdict(list)
        for row in members.values():
            below[parent_of(int(row[0]))].append(int(row[0]))
        assert self.process is not None
        agents = sorted(set(below) - {self.process.pid, 0, 1, parent_of(self.process.pid)})
        agents = [
            pid for pid in agents if b"polyhvd" in command_of(pid) and pid not in below[self.process.pid]
        ]
        return {pid: below[pid] for pid in agents if parent_of(pid) != self.process.pid}

    def _look(self) -> None:
        """What is in use, in a world that has made a step."""
        members = self.members()
        world = self.world(members)
        assert self.process is not None
        for m in world:
            if (use := use_of(int(members[m][0]), len(world))) is not None:
                self.uses[m].append(use)
        if (use := use_of(self.process.pid, len(members))) is not None:
            self.launcher_uses.append(use)  # a connection and pipes for each that lives, newcomers as well

    def _state(self) -> str:
        """Where everybody is, and their stacks."""
        lines = []
        for m, row in self.members().items():
            lines.append(
                f"process {m}: pid {row[0]}, generation {row[1]}, rank {row[2]}, step {row[3]}, "
                f"{PHASES[row[4]]}"
            )
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(row[0]), signal.SIGUSR2)
        time.sleep(1.0)
        kills = "\n".join(
            f"{k.moment:.3f} {k.kind} {k.during} in generation {k.generation}: {k.phases}"
            for k in self.done[-8:]
        )
        words = self.said.decode("utf-8", "replace")
        return "\n".join([*lines, "the last kills:", kills, "the job's last words:", words[-12000:]])

    # Judging

    def history(self) -> dict[int, dict[int, list[Any]]]:
        """By step: what each rank has noted of it in the last generation that has begun it.

        A generation undoes the steps from its first one on. With a survivor it undoes what was under way
        alone; where nobody survived, the steps since the last checkpoint, or all.
        """
        notes: dict[int, list[list[Any]]] = defaultdict(list)
        members: dict[int, set[str]] = defaultdict(set)
        for path in self.folder.glob("steps-*"):
            for line in path.read_text().splitlines():
                if not line.endswith("]"):
                    continue  # its process was killed while it wrote
                generation, *what = json.loads(line)
                notes[generation].append(what)
                members[generation].add(path.name)
        self.begun = {generation: min(note[4] for note in noted) for generation, noted in notes.items()}
        last: dict[int, dict[int, list[Any]]] = {}
        seen: set[str] = set()
        for generation in sorted(notes):
            first = min(note[2] for note in notes[generation])
            under_way = max(last, default=0)
            if first < under_way - 1 and members[generation] & seen:
                raise SoakError(f"generation {generation} has undone the steps {first} to {under_way}")
            seen |= members[generation]
            last = {step: noted for step, noted in last.items() if step < first}
            for rank, size, step, epoch, _, rows in notes[generation]:
                last.setdefault(step, {})[rank] = [size, epoch, rows]
        return last

    def _judge(self) -> None:
        said = self.said.decode("utf-8", "replace")
        ends = re.findall(r"end .*", said)
        if self._status() != 0:
            raise SoakError(f"the job has ended with status {self._status()}\n{self._state()}")
        history = self.history()
        steps = max(history) + 1
        if len(set(ends)) != 1 or not ends[0].endswith(f" counts [{float(self.epochs)}] steps {steps}"):
            raise SoakError(f"of {steps} steps and {self.epochs} epochs ranks say {ends}\n{said[-4000:]}")
        rows: dict[int, list[int]] = defaultdict(list)
        segments: list[list[int]] = []
        w = np.ones(INTEGERS, np.int64)
        for step in range(steps):
            noted = history[step]
            size, epoch, _ = next(iter(noted.values()))
            if sorted(noted) != list(range(size)):
                raise SoakError(f"step {step} of {size} ranks was noted by {sorted(noted)}")
            of_all = [row for _, _, own in noted.values() for row in own]
            rows[epoch] += of_all
            w = advanced(w, integers(of_all))
            if segments and segments[-1][1] == size:
                segments[-1][0] += 1
            else:
                segments.append([1, size])
        for epoch in range(self.epochs):
            if sorted(rows[epoch]) != list(range(ROWS)):
                twice = [row for row, count in Counter(rows[epoch]).items() if count > 1]
                missing = sorted(set(range(ROWS)) - set(rows[epoch]))
                raise SoakError(f"epoch {epoch}: rows {twice} twice, {missing} never")
        expected = (
            f"end {hashlib.sha256(w.tobytes()).hexdigest()[:16]} "
            if self.before
            else self._replayed(segments)
        )
        if not ends[0].startswith(expected):
            raise SoakError(f"{ends[0]} where the same history without failures has {expected}: {segments}")
        self._judge_growth()
        if left := self.members():
            raise SoakError(f"processes are left: {left}")

    def _replayed(self, segments: list[list[int]]) -> str:
        """What a job says that has the same history without failures."""
        self.allowed[0] = 1 << 60
        for path in (self.folder / "checkpoints").glob("*"):
            path.unlink()
        if self.is_of_one_size:
            process = self.start("-np", str(segments[0][1]))
        else:
            (self.folder / "history").write_text(json.dumps(segments))
            process = self.start("-np", "4", SOAK_HISTORY=str(self.folder / "history"))
        out, _ = process.communicate(timeout=END_S)
        found = re.search(rb"end \w+ ", out)
        if process.returncode or found is None:
            raise SoakError(f"the replay has failed:\n{out[-4000:].decode()}")
        return found[0].decode()

    def _judge_growth(self) -> None:
        self.growths = [grown for uses in self.uses.values() if (grown := growth(uses)) is not None]
        self.launcher_growth = growth(self.launcher_uses)
        for who, grown in [("the launcher", self.launcher_growth), *(("a rank", g) for g in self.growths)]:
            if grown is None:
                continue
            within = grown.descriptors <= DESCRIPTORS_MAX and grown.threads <= THREADS_MAX
            if not within or grown.memory > MEMORY_MAX:
                raise SoakError(f"{who} has grown by {grown}")

    def report(self) -> str:
        """One line, and one of the kills."""
        kinds = Counter(f"{kill.kind} {kill.during}".strip() for kill in self.done)
        phases = Counter(phase for kill in self.done for phase in kill.phases)
        longest = max((len(uses) for uses in self.uses.values()), default=0)
        of_ranks = Use(0, *(max((getattr(g, name) for g in self.growths), default=0) for name in MEASURES))
        of_launcher = self.launcher_growth or Use(0, 0, 0, 0)
        return (
            f"{self.killed} kills, {self.agents_ended} agents ended, {max(self.begun)} generations, "
            f"{longest} seen by one process; ranks grew by {of_ranks} at most, "
            f"the launcher by {of_launcher}\n  {dict(kinds)}; {dict(phases)}"
        )

    def recoveries(self) -> list[float]:
        """Seconds from the loss of a rank to the first step after it, where nothing was lost in between."""
        found = []
        for kill, following in zip(self.done, [*self.done[1:], None], strict=True):
            is_plain = kill.kind in ("a rank", "rank 0") and not (kill.blind or kill.during)
            if not is_plain or (following and following.blind):
                continue
            later = [moment for moment in self.begun.values() if moment > kill.moment]
            if later:
                found.append(min(later) - kill.moment)
        return found


def parent_of(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except OSError:
        return 0


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def hosts() -> Iterator[dict[str, Any]]:
    """Three hosts with an sshd each; what a job on them needs."""
    with (
        tempfile.TemporaryDirectory() as folder,
        netns.hosts(3) as found,
        sshd.sshd_on(Path(folder), found[1:]) as way,
    ):
        b, c = (host.address for host in found[1:])
        options = (*way, "-np", "3", "--min-np", "1", "--max-np", "4", *LIMITS)
        slots = {"localhost": 2, b: 1, c: 1}
        yield {"options": options, "hosts": slots, "before": tuple(found[0].command())}


def soak(framework: str, seed: int, kills: int, form: str) -> tuple[int, list[float]]:
    """One job; how many were killed, and how long recoveries have taken."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="polyhvd-soak-")))
        given = stack.enter_context(hosts()) if form == "hosts" else {}
        job = Job(framework, seed, kills, form, folder, **given)
        started = time.monotonic()
        job.go()
        print(
            f"seed {seed}, {framework}, {form}, {time.monotonic() - started:.0f} s: {job.report()}",
            flush=True,
        )
        return job.killed, job.recoveries()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--framework", default="numpy")
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--form", default="", help=f"one of {', '.join(FORMS)}, hosts")
    parser.add_argument("--rounds", type=int, default=0, help="at most so many jobs; 0: as many as it takes")
    given = parser.parse_args()
    forms = [given.form] if given.form else ["one size"]
    if given.framework == "numpy" and not given.form:
        forms = list(NUMPY_FORMS)
        if netns.available() and sshd.available() and given.kills > KILLS_MAX:
            forms.append("hosts")
    seed, killed, recoveries = given.seed, 0, []
    most = min(KILLS_MAX, max(15, -(-given.kills // len(forms))))
    while killed < given.kills and (given.rounds == 0 or seed < given.seed + given.rounds):
        form = forms[seed % len(forms)]
        kills = min(most, given.kills - killed)
        try:
            count, times = soak(given.framework, seed, kills, form)
        except SoakError as error:
            print(error)
            print(
                f"again: make soak SOAK_FRAMEWORK={given.framework} SOAK_SEED={seed} SOAK_KILLS={kills} "
                f"SOAK_FORM='{form}'"
            )
            return 1
        killed, recoveries, seed = killed + count, recoveries + times, seed + 1
    if len(recoveries) > 1:
        recoveries.sort()
        at = [recoveries[int(part * (len(recoveries) - 1))] * 1000 for part in (0.5, 0.9, 1.0)]
        print(
            f"{killed} kills; from the kill of a rank to the next step: median {at[0]:.0f} ms, 9 of 10 "
            f"within {at[1]:.0f} ms, {at[2]:.0f} ms at most"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
