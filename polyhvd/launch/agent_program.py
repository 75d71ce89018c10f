"""The agent's program as one text, which goes to wherever an agent is to run.

polyhvd need not lie at the same place there, and other files of it are not needed.
"""

from __future__ import annotations

from pathlib import Path

from polyhvd.launch import agent, processes

__all__ = ["agent_source", "reader"]


def agent_source() -> bytes:
    """What Python has to run: the modules of the agent, each under its own name."""
    module = processes.__name__
    return (
        "import sys, types\n"
        f"module = sys.modules[{module!r}] = types.ModuleType({module!r})\n"
        f"exec(compile({_text(processes.__file__)!r}, 'polyhvd-processes', 'exec'), module.__dict__)\n"
        f"exec(compile({_text(agent.__file__)!r}, 'polyhvd-agent', 'exec'), {{'__name__': '__main__'}})\n"
    ).encode()


def reader(source_bytes: int) -> str:
    """A program for ``python -c``: runs the source of that size that comes first on standard input."""
    return f"import sys;exec(compile(sys.stdin.buffer.read({source_bytes}),'polyhvd-program','exec'))"


def _text(path: str) -> str:
    return Path(path).read_text("utf-8")
