"""Reads what tests ask for: markers, and files that are not imported yet."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from polyhvd.installed import frameworks

__all__ = ["asked_for", "framework_of", "is_whole_module"]

_OPTIONS: dict[str, Any] = {
    "framework": None,
    "timeout_s": None,
    "env": {},
    "fresh": False,
    "initialized": True,
}


def asked_for(item: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Numbers of ranks and options of a test: each of the nearest mark that has it. No number: not on ranks.

    Raises:
        UsageError: the marker has no such argument, or no number.
    """
    numbers: tuple[Any, ...] = ()
    options: dict[str, Any] = {}
    for mark in item.iter_markers("ranks"):
        numbers = numbers or mark.args
        options = {**mark.kwargs, **options}
    if not numbers and not options and not item.config.getoption("polyhvd_np"):
        return (), _OPTIONS
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise pytest.UsageError(
            f"{item.nodeid}: the marker ranks() has no {', '.join(unknown)}; it has {', '.join(_OPTIONS)}"
        )
    if not numbers and item.config.getoption("polyhvd_np"):
        numbers = (item.config.getoption("polyhvd_np"),)
    if not numbers or not all(type(number) is int and number > 0 for number in numbers):
        found = ", ".join(map(repr, numbers)) or "none"
        raise pytest.UsageError(f"{item.nodeid}: the marker ranks() takes numbers of ranks, found {found}")
    return numbers, {**_OPTIONS, **options}


def is_whole_module(path: Path, everything: bool) -> bool:
    """Return whether all tests of a file run on ranks: ``pytestmark`` says so, or the command line does.

    Args:
        path: of a file of Python.
        everything: whether tests that are not marked run on ranks, too.
    """
    return everything or _read(path)[0]


def framework_of(path: Path, config: pytest.Config) -> str:
    """Return the NAME of the ``polyhvd.NAME`` that a file's tests import on ranks, unless a marker has it.

    What ``pytestmark`` names; else what the file imports; else ``--polyhvd-framework``; else "numpy".

    Raises:
        UsageError: the file imports several.
    """
    _, named, imported = _read(path)
    if named:
        return named
    if len(imported) > 1:
        raise pytest.UsageError(
            f"{path}: imports {' and '.join(f'polyhvd.{name}' for name in imported)}: a process has one "
            "framework; say which by pytestmark = pytest.mark.ranks(2, framework=...), or make two files"
        )
    return imported[0] if imported else str(config.getoption("polyhvd_framework") or "numpy")


@cache
def _read(path: Path) -> tuple[bool, str, tuple[str, ...]]:
    """Return whether ``pytestmark`` has ``ranks``, its framework, and the file's frameworks."""
    source = path.read_bytes()
    if b"polyhvd" not in source and b"ranks" not in source:
        return False, "", ()
    try:
        body = ast.parse(source).body
    except (SyntaxError, ValueError):  # the import will report it
        return False, "", ()
    marked, named = False, ""
    for statement in body:
        if not isinstance(statement, ast.Assign) or ast.unparse(statement.targets[0]) != "pytestmark":
            continue
        for node in ast.walk(statement.value):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("mark.ranks"):
                marked = bool(node.args) or marked
                words = {word.arg: word.value for word in node.keywords}
                value = words.get("framework")
                named = str(value.value) if isinstance(value, ast.Constant) and value.value else named
    return marked, named, tuple(sorted(set(_imported(body))))


def _imported(body: list[ast.stmt]) -> list[str]:
    """Frameworks whose adapters are imported at the top of a file; Keras' and Lightning's are for two."""
    names = []
    for node in body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "polyhvd":
            names += [f"polyhvd.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
    parts = [name.split(".") for name in names]
    return [part[1] for part in parts if part[0] == "polyhvd" and len(part) > 1 and part[1] in frameworks()]
