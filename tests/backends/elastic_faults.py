"""Elastic cases of the fault test: a job of polyhvdrun, and what befalls its ranks, all from one seed."""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from launching import Launcher

__all__ = ["ElasticCase", "elastic_case_of", "run_elastic_case"]

JOB = str(Path(__file__).with_name("elastic_fault_job.py"))
_KINDS = ("kill", "kill", "stop", "stop and kill", "shut a socket")


@dataclass(frozen=True)
class ElasticFault:
    """One thing that befalls who is rank ``victim`` then, after so long in a step."""

    kind: str
    victim: int
    step: int
    wait_s: float
    hold_s: float
    pick: int  # chooses among sockets


@dataclass(frozen=True)
class ElasticCase:
    """A job and its faults."""

    seed: int
    size: int
    least: int
    spares: int
    shared_memory: bool
    steps: int
    faults: tuple[ElasticFault, ...]


def elastic_case_of(seed: int) -> ElasticCase:
    """The case with this number."""
    chance = random.Random(f"elastic {seed}")
    size, steps = chance.randint(2, 4), chance.randint(10, 30)
    faults = tuple(
        ElasticFault(
            kind=chance.choice(_KINDS),
            victim=chance.randrange(size),
            step=chance.randrange(steps),
            wait_s=chance.choice([0.0, 0.001, 0.005, 0.02]) * chance.random(),
            hold_s=round(chance.uniform(0.02, 0.3), 3),
            pick=chance.randrange(1 << 16),
        )
        for _ in range(chance.choice([1, 1, 2]))
    )
    least, spares = chance.randint(1, size), chance.choice([0, 0, 1])
    return ElasticCase(seed, size, least, spares, chance.random() < 0.7, steps, faults)


def run_elastic_case(case: ElasticCase, launcher: Launcher, folder: Path) -> str:
    """Run it: it has to end in right numbers, or, where a rank was cut off from the launcher, or killed when
    the others had ended, in an error that says what is lost. Returns its status and output."""
    faults = json.dumps([asdict(fault) for fault in case.faults])
    options = ["-np", str(case.size), "--min-np", str(case.least), "--spares", str(case.spares)]
    env = {} if case.shared_memory else {"POLYHVD_SHARED_MEMORY": "0"}
    argv = [sys.executable, JOB, str(folder), str(case.steps), faults]
    status, out, err = launcher.start(*options, "--elastic-timeout", "30", argv=argv, env=env).finish()
    said = f"{case}\nstatus {status}\n{out}\n{err}"
    ends = [(line, int(size)) for line, size in re.findall(r"(end .*) of (\d+)", out)]
    total = 4.0 * sum(range(1, case.steps + 1))
    assert all(line == f"end {case.steps} [{total}]" for line, _ in ends), said
    # A fault waits for up to 20 ms, in which a fast machine ends several steps: some ranks may have ended
    # when another one is killed. The others finish in a smaller world; where there are none, the job fails.
    killed = any(fault.kind.endswith("kill") for fault in case.faults)
    cut = any(fault.kind == "shut a socket" for fault in case.faults)
    if status != 0:
        assert cut or (killed and ends), said
        assert err.rstrip().splitlines()[-1].strip(), said
        assert "polyhvdrun: " in err, said
        assert "InternalError: a bug" not in err, said
        return said
    worlds = Counter(size for _, size in ends)
    last = min(worlds, default=0)
    assert worlds[last] == last > 0, said
    assert len(worlds) == 1 or killed or cut, said
    assert case.least <= len(ends) <= case.size, said
    return said
