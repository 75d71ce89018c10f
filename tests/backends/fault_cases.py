"""Cases of the fault test: what a job is made of and what befalls it, all from one seed.

Pure: the same number gives the same case, in every process.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["ON_THE_WIRE", "TO_A_RANK", "Case", "Fault", "case_of"]

#: After these the job goes on as if nothing had happened.
HARMLESS = ("stop", "delay", "strangers")
#: Done to the bytes between two ranks, by a proxy.
ON_THE_WIRE = ("cut", "garble", "swallow", "repeat", "insert", "delay")
#: Done to a process, or by it.
TO_A_RANK = ("kill", "stop", "stop and kill", "shut a socket")

_NETWORKED = ((1, 1), (1, 1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1, 1))
_ALONE = ((2,), (3,), (4,))


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, when ``victim`` begins its operation number ``step``."""

    kind: str
    victim: int
    step: int  # -1: in init(), on the wire from the first byte on
    wait_s: float  # between the beginning of that step and the fault
    hold_s: float  # how long a rank is stopped, or bytes are held up
    purpose: str  # of the connection that is hit: data or control
    after_bytes: int  # that still pass on it
    count: int  # bytes that are hit; strangers
    pick: int  # chooses among connections, directions, sockets

    def __str__(self) -> str:
        what = f"{self.kind}: rank {self.victim}, step {self.step} + {self.wait_s * 1000:.1f} ms"
        if self.kind in ON_THE_WIRE:
            what += f", {self.count} bytes after {self.after_bytes} of {self.purpose}"
        return what


@dataclass(frozen=True)
class Case:
    """A job and its faults."""

    seed: int
    hosts: tuple[int, ...]
    shared_memory: bool
    checksums: bool
    sets: tuple[tuple[int, ...], ...]  # process sets beside the world
    steps: int  # while the faults happen; some more follow
    faults: tuple[Fault, ...]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return sum(self.hosts)

    @property
    def kinds(self) -> set[str]:
        """What kinds of faults there are."""
        return {fault.kind for fault in self.faults}

    @property
    def harmless(self) -> bool:
        """Whether the job has to come through."""
        return self.kinds <= set(HARMLESS)

    @property
    def settings(self) -> dict[str, str]:
        """Environment on top of what a launcher sets."""
        values = {"POLYHVD_START_TIMEOUT": "20", "POLYHVD_DATA_TIMEOUT_SECONDS": "30"}
        if not self.shared_memory:
            values["POLYHVD_SHARED_MEMORY"] = "0"
        elif self.seed % 2:
            values["POLYHVD_CMA"] = "1"
        if self.checksums:
            values["POLYHVD_DATA_CHECKSUMS"] = "1"
        if any(fault.step < 0 and "kill" in fault.kind for fault in self.faults):
            values["POLYHVD_START_TIMEOUT"] = "3"  # the others wait for it
        if self.kinds & set(ON_THE_WIRE) - {"delay"}:
            # Bytes that never come, in a stream that stays open: nothing but time tells.
            values["POLYHVD_DATA_TIMEOUT_SECONDS"] = "3"
            values["POLYHVD_STALL_CHECK_TIME_SECONDS"] = "1"
            values["POLYHVD_STALL_SHUTDOWN_TIME_SECONDS"] = "3"
        return values

    def __str__(self) -> str:
        hosts = "+".join(map(str, self.hosts)) + ("" if self.shared_memory else " over TCP")
        return f"seed {self.seed}: {hosts}; " + "; ".join(map(str, self.faults))


def case_of(seed: int) -> Case:
    """The case with this number."""
    chance = random.Random(seed)
    group = chance.choice(["rank", "rank", "wire", "wire", "wire", "strangers"])
    networked = group == "wire" or chance.random() < 0.5
    hosts = chance.choice(_NETWORKED if networked else _ALONE)
    shared_memory = networked or chance.random() < 0.7
    size = sum(hosts)
    steps = chance.randint(6, 20)
    sets = tuple(tuple(sorted(chance.sample(range(size), chance.randint(1, size - 1)))) for _ in range(2))
    faults = [_fault(chance, group, size, steps)]
    if chance.random() < 0.25:
        networked = max(hosts) < size or not shared_memory
        groups = ["rank", "strangers"] + ["wire"] * networked
        faults.append(_fault(chance, chance.choice(groups), size, steps))
    damaging = {fault.kind for fault in faults} & set(ON_THE_WIRE) - {"cut", "delay"}
    checksums = bool(damaging) or chance.random() < 0.3
    return Case(seed, hosts, shared_memory, checksums, tuple(dict.fromkeys(sets)), steps, tuple(faults))


def _fault(chance: random.Random, group: str, size: int, steps: int) -> Fault:
    kinds = {"rank": TO_A_RANK, "wire": ON_THE_WIRE, "strangers": ("strangers",)}[group]
    kind = chance.choice(kinds)
    may_be_early = ("cut", "garble", "delay", "kill", "stop", "stop and kill")
    early = kind == "strangers" or (kind in may_be_early and chance.random() < 0.1)
    purpose = chance.choice(["data", "data", "control"])
    digits = 2.3 if early or purpose == "control" else 4.5  # few control bytes pass in a job
    return Fault(
        kind=kind,
        victim=chance.randrange(size),
        step=-1 if early else chance.randrange(steps),
        wait_s=chance.choice([0.0, 0.0, 0.001, 0.005, 0.02]) * chance.random(),
        hold_s=chance.uniform(0.02, 0.3),
        purpose=purpose,
        after_bytes=int(10 ** chance.uniform(0, digits)),
        count=100 if kind == "strangers" else int(10 ** chance.uniform(0, 2.5)),
        pick=chance.randrange(1 << 16),
    )
