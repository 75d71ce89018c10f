"""Jobs that a launcher of MPI starts: a script in, what the ranks have printed out."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import mpirun

__all__ = ["SAY", "environment", "run", "start"]

ROOT = Path(__file__).resolve().parents[2]
_DEADLINE_S = 60.0

#: Begins scripts of ranks, which share a pipe: say() writes a line in one piece.
SAY = """
import os
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def environment(**settings: str) -> dict[str, str]:
    """That of a rank, without what another launcher or the user has set."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("POLYHVD_", "HOROVOD_"))}
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    return {**inherited, **paths, **dict(mpirun.AS_ROOT), **settings}


def start(
    script: Path,
    ranks: int,
    *,
    launcher: Sequence[str] = (),
    python: Sequence[str] = (),
    arguments: Sequence[str] = (),
    **settings: str,
) -> subprocess.Popen[str]:
    """Begin a job in a session of its own; ``launcher`` and ``python`` are options of these."""
    return subprocess.Popen(
        [*mpirun.command(), *launcher, "-np", str(ranks), sys.executable, *python, str(script), *arguments],
        cwd=ROOT,
        env=environment(POLYHVD_FLIGHT_DIR=str(script.parent), **settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(
    script: Path,
    ranks: int,
    *,
    launcher: Sequence[str] = (),
    python: Sequence[str] = (),
    arguments: Sequence[str] = (),
    **settings: str,
) -> tuple[int, str, str]:
    """Run a job to its end; returns exit status, standard output and error."""
    process = start(script, ranks, launcher=launcher, python=python, arguments=arguments, **settings)
    try:
        out, err = process.communicate(timeout=_DEADLINE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, out, err
