"""What a module offers, as text: its names, and the signatures of what can be called.

``python tests/surface/names.py MODULE... > FILE`` records it; a rank of a pool calls :func:`offered`.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
import sys
from collections.abc import Collection
from types import ModuleType
from typing import Any

__all__ = ["offered", "undeclared"]

#: What a default looks like to users, whatever module it is made in and whether there is a world.
_DEFAULTS = (
    (re.compile(r"<[\w.]*\.(\w+) object(?: at 0x[0-9a-f]+)?>"), r"<\1>"),
    (re.compile(r"ProcessSet\(process_set_id=0, ranks=[^)]*\)"), "global_process_set"),
)


def offered(name: str) -> list[str]:
    """A line for each public name of a module, and for each public method of its classes, sorted."""
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
    lines = []
    for item in sorted(names):
        value = getattr(module, item)
        if isinstance(value, ModuleType):
            lines.append(f"{item}: module {value.__name__}")
        elif inspect.isclass(value):
            lines += _class(item, value, names)
        elif callable(value):
            lines.append(f"{item}{_signature(value)}")
        else:
            lines.append(f"{item}: {type(value).__name__}")
    return lines


def undeclared(name: str) -> list[str]:
    """What ``dir()`` shows of a module that is not in its ``__all__``, or the other way round; sorted."""
    module = importlib.import_module(name)
    shown = dir(module)
    assert all(hasattr(module, item) for item in shown), "dir() names what is there"
    return sorted(set(module.__all__) ^ set(shown))


def _class(item: str, value: type, names: Collection[str]) -> list[str]:
    if issubclass(value, enum.Enum):
        return [f"{item}: {', '.join(f'{member.name}={member.value}' for member in value)}"]
    lines = [f"class {item}{_signature(value)}"]
    members: dict[str, Any] = {}
    for base in reversed(value.__mro__):  # with those of bases that are not listed themselves
        if base.__module__.startswith("polyhvd") and (base is value or base.__name__ not in names):
            members.update(vars(base))
    for name, member in sorted(members.items()):
        if not name.startswith("_"):
            function = getattr(member, "__func__", member)
            lines.append(f"{item}.{name}" + (_signature(function) if callable(function) else ""))
    return lines


def _signature(value: Any) -> str:
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    empty = inspect.Parameter.empty
    parameters = [p.replace(annotation=empty) for p in signature.parameters.values()]
    bare = signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty)
    text = str(bare)
    for pattern, short in _DEFAULTS:
        text = pattern.sub(short, text)
    return text


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(f"[{argument}]", *offered(argument), sep="\n")
