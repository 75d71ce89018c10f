"""Several programs in one job: which ranks run which, and on which hosts. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from polyhvd.launch.hosts.lists import Host, HostsError, check_number
from polyhvd.runtime.placement import Placement, placements

__all__ = ["Part", "Program", "argv_of", "lay_out", "rank_environment"]


@dataclass(frozen=True)
class Part:
    """One program as it was asked for."""

    argv: Sequence[str]
    size: int
    hosts: Sequence[Host] | None = None  # its own; None: those of the first, or this one
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Program:
    """One program of a job, and the ranks that run it."""

    argv: Sequence[str]
    ranks: range
    env: Mapping[str, str] = field(default_factory=dict)  # on top of the job's


def lay_out(parts: Sequence[Part]) -> tuple[list[Host], list[Placement], list[Program]]:
    """Place the programs one after the other: ranks are consecutive, the first program's first.

    A program without hosts fills the slots that the first one leaves free on its hosts.

    Raises:
        HostsError: a program has no ranks, or more than there are slots for it.

    Example::

        lay_out([Part(["a"], 1), Part(["b"], 3)])[2][1].ranks  # range(1, 4)
    """
    for number, part in enumerate(parts, 1):
        if part.size < 1:
            raise HostsError(f"program {number} ({part.argv[0]}): cannot start {part.size} ranks")
    size = sum(part.size for part in parts)
    here = Host("localhost", sum(part.size for part in parts if part.hosts is None))
    shared = list(parts[0].hosts or [here])
    for part in parts:
        named = part.hosts or shared
        check_number(named[0].name, part.size // len(named))  # at least so many on one of them
    names: dict[str, int] = {}  # of all hosts -> position
    slots: list[int] = []
    for host in [*shared, *(host for part in parts[1:] for host in part.hosts or ())]:
        names.setdefault(host.name, len(names))
        slots += [0] * (len(names) - len(slots))
        slots[names[host.name]] += host.slots
    free = [names[host.name] for host in shared for _ in range(min(host.slots, size))]
    positions: list[int] = []
    programs = []
    for number, part in enumerate(parts, 1):
        own = number > 1 and part.hosts is not None
        pool = free
        if own:
            pool = [names[host.name] for host in part.hosts or () for _ in range(min(host.slots, size))]
        if part.size > len(pool):
            listed = ", ".join(f"{host.name}:{host.slots}" for host in (part.hosts or () if own else shared))
            raise HostsError(
                f"program {number} ({part.argv[0]}): {part.size} ranks were requested, but {len(pool)} slots "
                f"are left for them ({listed}); give hosts more slots, or pass -H for this program"
            )
        programs.append(Program(part.argv, range(len(positions), len(positions) + part.size), part.env))
        positions += pool[: part.size]
        if not own:
            del free[: part.size]
    for name, position in names.items():
        check_number(name, positions.count(position))
    hosts = [Host(name, slots[position]) for name, position in names.items()]
    return hosts, placements([str(position) for position in positions]), programs


def argv_of(programs: Sequence[Program], ranks: Sequence[int]) -> list[str]:
    """One command that runs on each of these ranks the program that is its own.

    An agent starts one command for all its ranks. Where they differ that is a shell, which becomes the
    program of its rank.
    """
    here = [program for program in programs if any(rank in program.ranks for rank in ranks)]
    if len(here) == 1:
        return list(here[0].argv)
    cases = [
        f"{'|'.join(str(rank) for rank in ranks if rank in program.ranks)}) exec {shlex.join(program.argv)};;"
        for program in here
    ]
    return ["/bin/sh", "-c", f'case "$POLYHVD_RANK" in {" ".join(cases)} esac', "polyhvdrun"]


def rank_environment(
    programs: Sequence[Program], item: Placement, host: str, *, knows_rank: bool = True
) -> dict[str, str]:
    """The environment variables of one rank besides those of all: its place, and its program's settings.

    Args:
        programs: of the job, where there are several.
        item: the rank's place.
        host: its host, as users name it.
        knows_rank: False for a process that joins an elastic job, and whose rank is not known yet.
    """
    values = {**item.values(), "HOSTNAME": host}
    if not knows_rank:  # scripts would take the rank of another process for theirs
        for name in ("RANK", "SIZE", "CROSS_RANK", "CROSS_SIZE"):
            del values[name]
    own = [program.env for program in programs if item.rank in program.ranks]
    ours = {f"{prefix}_{name}": str(v) for name, v in values.items() for prefix in ("POLYHVD", "HOROVOD")}
    # POLYHVD_ALONE in the launcher's environment is not meant for its ranks. A rank may set it for a child.
    return {**(own[0] if own else {}), **ours, "POLYHVD_ALONE": "0"}
