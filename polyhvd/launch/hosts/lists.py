"""Which ranks run where: parses host lists and assigns slots. Pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from polyhvd.runtime.placement import Placement, placements

__all__ = ["Host", "HostsError", "check_number", "parse_hostfile", "parse_hosts", "place"]

#: More than the cores of any machine; a slip of the keyboard is more.
_RANKS_PER_HOST_MAX = 4096
_NAME = re.compile(r"(?!-)[\w.@%-]+|\[[0-9A-Fa-f:.%\w]+\]")


class HostsError(ValueError):
    """A host list that cannot be used."""


@dataclass(frozen=True)
class Host:
    """A host as it was named, and how many ranks it takes."""

    name: str
    slots: int


def parse_hosts(text: str, slots: int = 1) -> list[Host]:
    """Read ``host1:2,host2:2``; a host without a number has ``slots`` of them. Raises HostsError."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    return _merge([_host(item, item, slots) for item in items], repr(text))


def parse_hostfile(path: str, slots: int = 1) -> list[Host]:
    """Read a file with a host a line: ``host1 slots=2`` or ``host1:2``; ``#`` begins a comment.

    As in the lists of batch systems, a host has as many slots as there are lines with only its name; one
    such line means ``slots`` of them. Raises HostsError.
    """
    try:
        lines = Path(path).read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise HostsError(f"cannot read the host file {path}: {error}") from None
    hosts = []
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        where = f"{path}, line {number}"
        given = [word.removeprefix("slots=") for word in words[1:] if word.startswith("slots=")]
        if len(words) > 1 and not given:
            raise HostsError(f"{where}: expected 'host slots=N', found {line.strip()!r}")
        hosts.append(_host(f"{words[0]}:{given[0]}" if given else words[0], where, slots))
    return _merge(hosts, path)


def place(hosts: list[Host], size: int | None = None) -> list[Placement]:
    """Fill the hosts in their order with ranks 0 .. size-1; all slots when ``size`` is None.

    The ranks know a host by its position in the list, as text: its name may be another for each of them.

    Raises:
        HostsError: there are fewer slots, or no rank is asked for, or more of a host than any can run.

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
            f"{size} ranks were requested, but there are {slots} slots ({listed}); "
            f"give hosts more slots, as in -H {hosts[0].name}:{size}"
        )
    left = size
    for host in hosts:
        check_number(host.name, min(left, host.slots))
        left -= min(left, host.slots)
    numbers = (str(number) for number, host in enumerate(hosts) for _ in range(host.slots))
    return placements(list(islice(numbers, size)))


def check_number(host: str, ranks: int) -> None:
    """Raise HostsError for more ranks than any host can run."""
    if ranks > _RANKS_PER_HOST_MAX:
        raise HostsError(f"{ranks} ranks on {host}: a host takes {_RANKS_PER_HOST_MAX} ranks at most")


@dataclass(frozen=True)
class _Entry:
    host: Host
    numbered: bool  # the list says how many slots


def _host(text: str, where: str, default: int) -> _Entry:
    name, colon, slots = text.rpartition(":")
    numbered = bool(colon) and not text.endswith("]")
    if not numbered:
        name, slots = text, str(default)
    if not _NAME.fullmatch(name):
        raise HostsError(f"{where}: {name!r} is not a host name (a list reads host1:2,host2:2)")
    if not (slots.isascii() and slots.isdigit()) or not int(slots[:9]) >= 1 or len(slots) > 9:
        raise HostsError(f"{where}: {slots!r} is not a number of slots (1 or more)")
    return _Entry(Host(name.removeprefix("[").removesuffix("]"), int(slots)), numbered)


def _merge(entries: list[_Entry], where: str) -> list[Host]:
    """One entry a host. A name that is repeated without numbers adds up; with a number it is a mistake.

    Names that differ only in the case of letters are those of one host.
    """
    slots: dict[str, int] = {}
    numbered: set[str] = set()
    lines = Counter(entry.host.name.lower() for entry in entries)
    names: dict[str, str] = {}
    for entry in entries:
        count = entry.host.slots
        name = names.setdefault(entry.host.name.lower(), entry.host.name)
        if name in slots and (entry.numbered or name in numbered):
            raise HostsError(
                f"{where} names {name} twice, with a number of slots; name it once, with all its slots"
            )
        numbered |= {name} if entry.numbered else set()
        # One line means as many slots as hosts have; several are a batch system's, with one slot each.
        slots[name] = lines[name.lower()] if name in slots else count
    if not slots:
        raise HostsError(f"{where} lists no host")
    return [Host(name, count) for name, count in slots.items()]
