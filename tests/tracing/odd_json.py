"""Files of JSON lines in which one value is not what a program has written."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_ABSENT = object()
_ODD = [_ABSENT, None, True, -1, 1.5, 10**400, float("nan"), "\x1b[31m", [], [1], {}, {"a": 1}]


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key in value if isinstance(value, dict) else ():
        yield from _places(value[key], (*path, key))


def variants(path: Path) -> Iterator[str]:
    """The text of the file, each time with one change."""
    whole = path.read_text()
    lines = [line.removesuffix(",") for line in whole.splitlines()]
    for number, line in enumerate(lines):
        if line in ("[", "]"):
            continue
        event = json.loads(line)
        for place in _places(event):
            for odd in _ODD:
                changed = copy.deepcopy(event)
                inner = changed
                for key in place[:-1]:
                    inner = inner[key]
                if odd is _ABSENT:
                    del inner[place[-1]]
                else:
                    inner[place[-1]] = odd
                yield "\n".join([*lines[:number], json.dumps(changed), *lines[number + 1 :]]) + "\n"
        nested = "[" * 20_000
        yield "\n".join([*lines[:number], nested, *lines[number + 1 :]]) + "\n"
        yield "\n".join([*lines[:number], "7", *lines[number + 1 :]]) + "\n"
    for end in range(0, len(whole), 16):
        yield whole[:end]
