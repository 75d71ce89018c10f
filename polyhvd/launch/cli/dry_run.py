"""``polyhvdrun --dry-run``: what would run where, as text. What is named like a secret is not shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

from polyhvd.launch.elastic.driven import Elastic
from polyhvd.launch.job.job import JobSpec
from polyhvd.launch.job.programs import Program
from polyhvd.rendezvous import network

__all__ = ["hide_secrets", "plan"]

_HIDDEN = "..."
_SECRET = re.compile(
    r"secret|token|passw|passphrase|credential|api_?key|access_?key|private_?key|(?<![a-z])auth(?![a-z])",
    re.I,
)


def plan(spec: JobSpec) -> list[str]:
    """Say of each host which ranks it gets, of each program its command, and what is set for them.

    Example::

        print("\\n".join(plan(spec)))
    """
    if spec.elastic is not None:
        return _elastic_plan(spec, spec.elastic)
    used = sorted({int(item.host) for item in spec.placements})
    lines = [f"{_count(len(spec.placements), 'rank')} on {_count(len(used), 'host')}"]
    lines += [spec.found] if spec.found else []
    for number in used:
        host = spec.hosts[number]
        ranks = [item.rank for item in spec.placements if item.host == str(number)]
        here = spec.agents is None and network.is_local(host.name)
        way = "here" if here else f"by {spec.way or 'ssh'}"
        lines.append(f"host {host.name} ({way}): {_ranks(ranks)}")
    programs = list(spec.programs) or [Program(spec.argv, range(len(spec.placements)))]
    for program in programs:
        lines.append(f"{_ranks(program.ranks)}: {shlex.join(hide_secrets(program.argv))}")
        lines += _environment(program.env)
    return [*lines, *_end(spec)]


def _elastic_plan(spec: JobSpec, elastic: Elastic) -> list[str]:
    limits = elastic.limits
    lines = [f"elastic: {_count(limits.size, 'rank')} at first, {limits.min_size} to {limits.max_size} later"]
    lines += [f"{_count(limits.spares, 'spare')} on each host"] if limits.spares else []
    for host in elastic.hosts:
        way = "here" if network.is_local(host.name) else f"by {spec.way or 'ssh'}"
        lines.append(f"host {host.name} ({way}): {_count(host.slots, 'slot')}")
    lines += ["hosts may come and go"] if elastic.discovery is not None else []
    lines.append(f"every process: {shlex.join(hide_secrets(spec.argv))}")
    return [*lines, *_end(spec)]


def _end(spec: JobSpec) -> list[str]:
    return [
        "every rank, beside the environment of polyhvdrun:",
        *_environment({"PYTHONUNBUFFERED": "1", **spec.env}),
        "nothing was started",
    ]


def hide_secrets(words: Sequence[str]) -> list[str]:
    """Hide values that are named like secrets: ``TOKEN=x``, ``--password=x``, ``--api-key x``."""
    shown = []
    hide = False
    for word in words:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("-"):
            shown.append(_HIDDEN)
        elif equals and _SECRET.search(name.replace("-", "_")):
            shown.append(f"{name}={_HIDDEN}")
        else:
            shown.append(word)
        hide = not equals and word.startswith("-") and bool(_SECRET.search(word.replace("-", "_")))
    return shown


def _environment(values: Mapping[str, str]) -> list[str]:
    return [
        f"  {name}={_HIDDEN if _SECRET.search(name) else shlex.quote(value)}"
        for name, value in sorted(values.items())
    ]


def _ranks(ranks: Iterable[int]) -> str:
    """``ranks 0-2, 5``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)
    return f"ranks {text}" if "-" in text or "," in text else f"rank {text}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
