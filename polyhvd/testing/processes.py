"""Looks at processes from outside, through /proc."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_running", "processes_with", "state_of"]


def is_running(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    return state_of(pid) not in ("", "Z", "X")


def state_of(pid: int) -> str:
    """The letter that ps shows; empty when there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def processes_with(variable: str, value: str) -> list[int]:
    """Running processes that were started with this variable in their environment."""
    wanted = f"{variable}={value}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if wanted in environment and is_running(int(folder.name)):
            found.append(int(folder.name))
    return sorted(found)
