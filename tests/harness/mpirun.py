"""The launcher of MPI that tests use, and how it is called: also as root, and with more ranks than cores."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

__all__ = ["AS_ROOT", "command", "everything", "going_on"]

#: Open MPI's launchers start nothing for root without these.
AS_ROOT = tuple(
    (f"{name}_{what}", "1")
    for name in ("OMPI", "PRTE")
    for what in ("ALLOW_RUN_AS_ROOT", "ALLOW_RUN_AS_ROOT_CONFIRM")
)


def everything() -> bool:
    """Whether to run all that can run under MPI's launcher, instead of some for each framework."""
    return os.environ.get("TEST_BY_MPI") == "all"


@cache
def command() -> tuple[str, ...]:
    """mpirun beside this Python, as the wheels bring it, or else the system's; empty: there is none."""
    beside = Path(sys.executable).parent / "mpirun"
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        return ()
    said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
    return (found, "--oversubscribe") if "Open MPI" in said or "prte" in said.lower() else (found,)


@cache
def going_on() -> tuple[str, ...]:
    """Options with which the launcher leaves the others alone when a rank dies; empty: it has none."""
    said = subprocess.run([command()[0], "--version"], capture_output=True, text=True, check=False).stdout
    if "(Open MPI) 4" in said:
        return ("--enable-recovery",)
    return ("--runtime-options", "recoverable") if "(Open MPI) 5" in said else ()
