"""Bundles a program's modules into one text that is sent to a host: the agent, and the survey of a host.

polyhvd need not be installed there.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from polyhvd.launch.job import agent, processes

__all__ = ["READER", "agent_code", "agent_source", "code_reader", "examination", "reader"]

#: What :func:`reader` does, as a file, whose arguments no shell would change.
READER = Path(__file__).with_name("agent_reader.py")
_CODE_READER = """# polyhvd-program
def run():
    import marshal, sys, types
    for name, code in marshal.loads(sys.stdin.buffer.read({size})):
        exec(code, sys.modules.setdefault(name, types.ModuleType(name)).__dict__)
run()
"""


def agent_source() -> bytes:
    """The code for Python to run: the modules of the agent, each under its own name."""
    text = _text(agent)
    run = f"exec(compile({text!r}, 'polyhvd-agent', 'exec'), {{'__name__': '__main__'}})\n"
    return (_modules([processes]) + run).encode()


def agent_code() -> bytes:
    """Return the program compiled for this version of Python: compiling takes half of an agent's start."""
    modules = ((processes, processes.__name__), (agent, "__main__"))
    return marshal.dumps([(name, _code(module)) for module, name in modules])


def code_reader(code_bytes: int) -> str:
    """The function of :func:`reader`, for a source that is the result of :func:`agent_code`."""
    return _CODE_READER.format(size=code_bytes)


def examination(modules: Sequence[ModuleType], request: dict[str, Any]) -> bytes:
    """The code that an agent runs for an EXAMINE: ``main(request)`` of the last of these modules.

    Args:
        modules: each after those that it imports. They use only the standard library of Python 3.8.
        request: goes through JSON.
    """
    name = modules[-1].__name__
    run = f"import json\nsys.modules[{name!r}].main(json.loads({json.dumps(request)!r}))\n"
    return (_modules(modules) + run).encode()


def reader(source_bytes: int) -> str:
    """A program for ``python -c``: runs the source of that size that comes first on standard input."""
    return f"import sys;exec(compile(sys.stdin.buffer.read({source_bytes}),'polyhvd-program','exec'))"


def _modules(modules: Sequence[ModuleType]) -> str:
    """A program that has these modules imported."""
    lines = ["import sys, types"]
    for module in modules:
        name = module.__name__
        lines += [
            f"module = sys.modules[{name!r}] = types.ModuleType({name!r})",
            f"exec(compile({_text(module)!r}, {name!r}, 'exec'), module.__dict__)",
        ]
    return "\n".join([*lines, ""])


def _code(module: ModuleType) -> CodeType:
    """Return the code of a module, from the file in which the import has stored it, if it could."""
    load = getattr(module.__loader__, "get_code", None)  # of an InspectLoader
    code: CodeType | None = load(module.__name__) if load is not None else None
    return code or compile(_text(module), module.__name__, "exec")


def _text(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text("utf-8")
