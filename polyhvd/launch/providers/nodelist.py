"""Slurm's short forms: names of hosts, ``node[01-04,7],gpu3``, and numbers for each, ``2(x3),1``. Pure.

https://slurm.schedmd.com/scontrol.html, "show hostnames"; https://slurm.schedmd.com/sbatch.html,
SLURM_TASKS_PER_NODE.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

__all__ = ["counts", "expand"]

_HOSTS_MAX = 1 << 16
_PART = re.compile(r"\[([^][]*)\]|([^][,\s]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?", re.ASCII)


def expand(text: str) -> list[str]:
    """The names that a list stands for, in its order.

    Raises:
        ValueError: the text is no such list, perhaps cut off, or stands for more than 65536 names.

    Example::

        expand("node[01-03],gpu7")  # ["node01", "node02", "node03", "gpu7"]
    """
    names: list[str] = []
    for item in _items(text):
        for name in _names(item, text):
            names.append(name)
            if len(names) > _HOSTS_MAX:
                raise ValueError(f"{text!r} stands for more than {_HOSTS_MAX} hosts")
    return names


def counts(text: str) -> list[int]:
    """The numbers that a list stands for, one for each host, in its order.

    Raises:
        ValueError: the text is no such list, perhaps cut off, or is for more than 65536 hosts.

    Example::

        counts("2(x3),1")  # [2, 2, 2, 1]
    """
    numbers: list[int] = []
    for item in text.split(","):
        match = _COUNT.fullmatch(item)
        if match is None or not int(match[1]) or (match[2] and not int(match[2])):
            raise ValueError(f"{text!r}: {item!r} is neither a number (1 or more) nor N(xHOSTS)")
        repeats = int(match[2] or 1)
        if len(numbers) + repeats > _HOSTS_MAX:
            raise ValueError(f"{text!r} is for more than {_HOSTS_MAX} hosts")
        numbers += [int(match[1])] * repeats
    return numbers


def _items(text: str) -> Iterator[str]:
    """The parts between commas that are not within brackets."""
    item, depth = "", 0
    for character in text:
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise ValueError(f"{text!r}: brackets do not match")
        if character == "," and depth == 0:
            yield item
            item = ""
        else:
            item += character
    if depth:
        raise ValueError(f"{text!r} is cut off: a bracket is not closed")
    if item or text:
        yield item


def _names(item: str, text: str) -> Iterator[str]:
    """The names of one item: any text with any number of ranges in it."""
    end, count = 0, 1
    pieces: list[list[str]] = []
    for match in _PART.finditer(item):
        if match.start() != end:
            break
        end = match.end()
        numbers = [match[2]] if match[1] is None else list(_numbers(match[1], text))
        count *= len(numbers)
        if count > _HOSTS_MAX:
            raise ValueError(f"{text!r} stands for more than {_HOSTS_MAX} hosts")
        pieces.append(numbers)
    if not item or end != len(item):
        raise ValueError(f"{text!r}: {item!r} is not a name of a host")
    for words in itertools.product(*pieces):
        yield "".join(words)


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """The numbers of ``01-04,7``, each as wide as the first of its range."""
    for item in ranges.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise ValueError(f"{text!r}: {item!r} is not a range of numbers")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= _HOSTS_MAX:
            raise ValueError(f"{text!r}: the range {item!r} is empty or too long")
        for value in range(int(first), int(last) + 1):
            yield f"{value:0{len(first)}d}"
