"""Which ranks run where: parses host lists and assigns slots. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from polyhvd.runtime.placement import Placement, placements

__all__ = ["Host", "HostsError", "parse_hostfile", "parse_hosts", "place"]

_NAME = re.compile(r"(?!-)[\w.@%-]+|\[[0-9A-Fa-f:.%\w]+\]")


class HostsError(ValueError):
    """A host list that cannot be used."""


@dataclass(frozen=True)
class Host:
    """A host as it was named, and how many ranks it takes."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """Read ``host1:2,host2:2``; a host without a number has one slot. Raises HostsError."""
    hosts = [_host(item.strip(), item.strip()) for item in text.split(",") if item.strip()]
    return _merge(hosts, text)


def parse_hostfile(path: str) -> list[Host]:
    """Read a file with a host a line: ``host1 slots=2`` or ``host1:2``; ``#`` begins a comment."""
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HostsError(f"cannot read the host file {path}: {error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        slots = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
        if len(words) > 1 and not slots:
            raise HostsError(f"{where}: expected 'host slots=N', found {line.strip()!r}")
        hosts.append(_host(f"{words[0]}:{slots[0]}" if slots else words[0], where))
    return _merge(hosts, path)


def place(hosts: list[Host], size: int | None = None) -> list[Placement]:
    """Fill the hosts in their order with ranks 0 .. size-1; all slots when ``size`` is None.

    The ranks know a host by its position in the list, as text: its name may be another for each of them.

    Raises:
        HostsError: there are fewer slots, or no rank is asked for.

    Example::

        place([Host("a", 1), Host("b", 2)])[2].host  # "1"
    """
    slots = sum(host.slots for host in hosts)
    size = slots if size is None else size
    if size < 1:
        raise HostsError(f"cannot start {size} ranks")
    if size > slots:
        listed = ", ".join(f"{host.name}:{host.slots}" for host in hosts)
        raise HostsError(
            f"{size} ranks were asked for, but there are {slots} slots ({listed}); "
            f"give hosts more slots, as in -H {hosts[0].name}:{size}"
        )
    numbers = (str(number) for number, host in enumerate(hosts) for _ in range(host.slots))
    return placements(list(islice(numbers, size)))


def _host(text: str, where: str) -> Host:
    name, colon, slots = text.rpartition(":")
    if not colon or text.endswith("]"):
        name, slots = text, "1"
    if not _NAME.fullmatch(name):
        raise HostsError(f"{where}: {name!r} is not a host name (a list reads host1:2,host2:2)")
    if not slots.isdigit() or int(slots) < 1:
        raise HostsError(f"{where}: {slots!r} is not a number of slots")
    return Host(name.removeprefix("[").removesuffix("]"), int(slots))


def _merge(hosts: list[Host], where: str) -> list[Host]:
    """One entry a host: a host that is listed twice has the slots of both."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    if not slots:
        raise HostsError(f"{where!r} lists no host")
    return [Host(name, count) for name, count in slots.items()]
