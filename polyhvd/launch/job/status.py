"""The ``polyhvd status`` command: what a running job does now, and what it waits for."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from polyhvd.elastic.standing import lasting
from polyhvd.launch.job import control
from polyhvd.observe.terminal import printable

__all__ = ["add_options", "head", "lines", "main", "query"]

#: Hosts that are listed without ``--all``, and those of one state on a host.
_HOSTS_MAX, _NAMED_MAX = 20, 16
#: States of a slot that need no attention.
_USUAL = ("running", "training", "ready", "done", "free")


def main(arguments: Sequence[str]) -> int:
    """Run it; returns the exit status: 1 when there is no such job, or it does not answer."""
    parser = argparse.ArgumentParser(
        prog="polyhvd status",
        description="Show what a running job does now, and which processes, hosts or slots it waits for. "
        "Runs on the launcher's host.",
        epilog="example: polyhvd status --json",
    )
    add_options(parser)
    options = parser.parse_args(arguments)

    def ask(job: int) -> None:
        found = query(job, options.timeout_s)
        if options.json:
            print(json.dumps(found))
            return
        try:
            shown = list(lines(found, time.time(), whole=options.all))
        except (KeyError, TypeError, ValueError, AttributeError):
            raise OSError(f"job {job} has sent an invalid answer") from None
        print("\n".join(map(printable, shown)))

    return control.converse("polyhvd status", options.job, ask, fixed=True)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add = parser.add_argument
    add(
        "--job",
        type=int,
        metavar="PID",
        help="process id of polyhvdrun; default: that of the only job on this host",
    )
    add("--json", action="store_true", help="print a JSON object with every slot")
    add("--all", action="store_true", help=f"list every host, not only {_HOSTS_MAX} of them")
    add(
        "--timeout-s",
        type=control.limit_s,
        default=10.0,
        metavar="S",
        help="seconds to wait for the job's answer; default: 10",
    )


def query(job: int, timeout_s: float, *, metrics: bool = False) -> dict[str, Any]:
    """Ask a job for its state.

    Args:
        job: process id of its launcher.
        timeout_s: seconds to wait for the answer.
        metrics: whether to ask for the metrics of its ranks, too: a list "reports".

    Raises:
        TimeoutError: no answer in time.
        OSError: there is no such job, it has ended, or its answer is invalid.
    """
    found: dict[str, Any] = {"slots": [], "hosts": [], **({"reports": []} if metrics else {})}

    def on_reply(content: dict[str, Any]) -> None:
        for name, value in content.items():
            if name in ("slots", "hosts", "reports") and isinstance(value, list):
                found.setdefault(name, []).extend(value)
            else:
                found[name] = value

    content = {"status": True, **({"metrics": True} if metrics else {})}
    control.request(job, content, on_reply, timeout_s)
    if "error" in found:
        raise OSError(str(found["error"]))
    if not found.pop("end", False):
        raise OSError(f"job {job} has ended meanwhile")
    return found


def lines(found: Mapping[str, Any], now: float, *, whole: bool = False) -> Iterator[str]:
    """An answer as lines for a user.

    Args:
        found: the answer.
        now: the time by ``time.time()``.
        whole: whether to list every host.
    """
    yield from head(found, now)
    if world := found["world"]:
        size = f"{world['size']} rank{'' if world['size'] == 1 else 's'}"
        yield f"world: generation {world['generation']}, {size}, for {lasting(now - world['since'])}"
    if commit := found.get("commit"):
        yield f"last commit at a change of world: {commit['number']} of call {commit['call']}"
    if found.get("step_s") is not None:
        yield f"a step takes {1e3 * found['step_s']:.3g} ms"
    for item in found["hosts"]:
        until = "" if item["until"] is None else f" for {lasting(item['until'] - now)} more"
        yield f"{item['host']}: {item['state']}{until}{f' ({why})' if (why := item['why']) else ''}"
    yield from _places(found["slots"], now, whole=whole)


def head(found: Mapping[str, Any], now: float) -> Iterator[str]:
    """The first lines of an answer: which job it is, and what it does.

    Args:
        found: the answer.
        now: the time by ``time.time()``.
    """
    kind = "elastic job" if found["elastic"] else "job"
    yield f"{kind} {found['job']}, for {lasting(now - found['started'])}: {found['command']}"
    since = "" if found["since"] is None else f" (for {lasting(now - found['since'])})"
    yield f"now: {found['sentence']}{since}"
    if found["reason"]:
        yield f"why: {found['reason']}"
    if found["until"] is not None:
        yield f"ends: in {lasting(found['until'] - now)}, unless enough slots become free (--elastic-timeout)"


def _places(slots: Sequence[Mapping[str, Any]], now: float, *, whole: bool) -> Iterator[str]:
    hosts: dict[str, list[Mapping[str, Any]]] = {}
    for slot in slots:
        hosts.setdefault(slot["host"], []).append(slot)
    # Those that need attention come first, the others in their order.
    order = sorted(hosts, key=lambda host: all(slot["state"] in _USUAL for slot in hosts[host]))
    for host in order if whole else order[:_HOSTS_MAX]:
        yield f"{host}: {'; '.join(_states(hosts[host], now))}"
    if not whole and len(order) > _HOSTS_MAX:
        yield f"{len(order) - _HOSTS_MAX} more hosts: --all lists them"


def _states(slots: Sequence[Mapping[str, Any]], now: float) -> Iterator[str]:
    """The slots of a host, those of one state together unless there is a reason for it."""
    names: dict[str, list[str]] = {}
    for slot in slots:
        until = "" if slot["until"] is None else f" for {lasting(slot['until'] - now)} more"
        why = f" ({slot['why']})" if slot["why"] else ""
        names.setdefault(f"{slot['state']}{until}{why}", []).append(_name(slot))
    for state, those in names.items():
        more = [f"{len(those) - _NAMED_MAX} more"] if len(those) > _NAMED_MAX else []
        yield f"{', '.join([*those[:_NAMED_MAX], *more])} {state}"


def _name(slot: Mapping[str, Any]) -> str:
    rank = "" if slot["rank"] is None else f"rank {slot['rank']}"
    if slot["process"] is None:
        return rank or f"slot {slot['slot']}"
    return f"process {slot['process']}{f' ({rank})' if rank else ''}"
