"""What the documentation of public functions and classes lacks."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from typing import Any

__all__ = ["lacking", "run_examples"]

_EXAMPLE = re.compile(r"^Example::", re.MULTILINE)


def lacking(name: str) -> dict[str, list[str]]:
    """For each name of a module's ``__all__`` whose documentation lacks something, what that is."""
    module = importlib.import_module(name)
    found = {item: _lacking(getattr(module, item)) for item in module.__all__}
    return {item: lacks for item, lacks in found.items() if lacks}


def _lacking(value: Any) -> list[str]:
    if inspect.isclass(value):
        if issubclass(value, (enum.Enum, BaseException)):  # their names and texts say it
            return [] if value.__doc__ else ["a docstring"]
    elif not inspect.isroutine(value):
        return []
    text = inspect.getdoc(value) or ""
    lacks = [] if text else ["a docstring"]
    documented = _arguments(text)
    lacks += [name for name in _parameters(value) if name not in documented]
    if not _EXAMPLE.search(text):
        lacks.append("Example")
    return lacks


def _parameters(value: Any) -> list[str]:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def _arguments(text: str) -> set[str]:
    """The names before the colons of the section Args or Attributes, and those that are mentioned in it."""
    section = re.search(r"^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)*)", text, re.MULTILINE)
    if section is None:
        return set()
    lines = re.findall(r"^    (\w[\w, *]*):", section[1], re.MULTILINE) + re.findall(r"``(\w+)``", section[1])
    return {name.strip(" *") for line in lines for name in line.split(",")}


def run_examples(name: str) -> list[str]:
    """Run the example of each function of a module; those that fail, with the error."""
    module = importlib.import_module(name)
    failed = []
    for item in module.__all__:
        text = inspect.getdoc(getattr(module, item)) or ""
        lines = re.search(r"^Example::\n\n((?:    .*\n?)+)", text, re.MULTILINE)
        assert lines is not None, item
        try:
            exec(inspect.cleandoc(lines[1]), {"batches": [], "train": print})
        except Exception as error:
            failed.append(f"{item}: {error}")
    return failed
