"""Runs scripts of checks once as the ranks of a job; each check is a test of its own.

TensorFlow takes seconds to import, so the checks of a script share their processes, and so do scripts.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fork_servers import IMPORTS, SETTINGS, ForkServers  # tests/harness, on the path by tests/conftest.py

HERE = Path(__file__).parent
TIMEOUT_S = 400

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

IS_KERAS_2 = importlib.metadata.version("keras").startswith("2.")
#: Values of ``legacy_keras``: with Keras 3, and with Keras 2 where it is there.
LEGACY = [
    pytest.param(
        legacy,
        marks=pytest.mark.skipif(
            legacy and (IS_KERAS_2 or importlib.util.find_spec("tf_keras") is None),
            reason="TensorFlow has one Keras here",
        ),
        id="keras2" if legacy or IS_KERAS_2 else "keras3",
    )
    for legacy in (False, True)
]


def checks_in(script: str) -> list[str]:
    """Names of the functions that ``spmd.check`` marks in a script."""
    return re.findall(r"^@check\ndef (\w+)", (HERE / script).read_text(), re.MULTILINE)


#: Scripts that share the processes of a job: those of as many ranks and of the same Keras.
TOGETHER = {
    (3, False): (
        "ranks_ops.py",
        "ranks_collectives.py",
        "ranks_calls.py",
        "ranks_process_sets.py",
        "ranks_generations.py",
    ),
    (2, False): (
        "ranks_norm.py",
        "ranks_keras.py",
        "ranks_models.py",
        "ranks_passes.py",
        "ranks_schedules.py",
    ),
    (2, True): ("ranks_norm.py", "ranks_schedules.py", "ranks_keras2.py"),
    (4, False): ("ranks_errors.py",),  # which ends with a rank that dies
}
#: The scripts whose tests this session runs, and the session's servers; the conftest fills them in.
selected: set[str] = set()
servers: ForkServers | None = None


@functools.cache
def _jobs(ranks: int, legacy_keras: bool) -> dict[str, subprocess.CompletedProcess[str]]:
    """The job that each script was part of. After a failure, the scripts that follow get another one."""
    waiting = [script for script in TOGETHER[ranks, legacy_keras] if script in selected]
    found: dict[str, subprocess.CompletedProcess[str]] = {}
    while waiting:
        job = _launch(waiting, ranks, legacy_keras)
        ended = [
            s for s in waiting if len(re.findall(rf"ENDED {_module(s)}$", job.stdout, re.MULTILINE)) == ranks
        ]
        tried = waiting[: len(ended) + 1]
        found.update(dict.fromkeys(tried, job))
        waiting = waiting[len(tried) :]
    return found


def _module(script: str) -> str:
    return script.removesuffix(".py")


def _launch(scripts: list[str], ranks: int, legacy_keras: bool) -> subprocess.CompletedProcess[str]:
    """The finished job; ``tf.keras`` is tf_keras if wanted."""
    legacy = {"TF_USE_LEGACY_KERAS": "1"} if legacy_keras else {}
    assert servers is not None
    python = servers.python(ranks, IMPORTS["tensorflow"], **legacy)
    command = [sys.executable, "-m", "polyhvd.launch", "-np", str(ranks), *python]
    command += [str(HERE / "several_scripts.py"), *map(_module, scripts)]
    env = {**os.environ, **SETTINGS, **legacy}
    limit = TIMEOUT_S * len(scripts)
    try:
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired as expired:
        output = [(part or b"").decode(errors="replace") for part in (expired.stdout, expired.stderr)]
        return subprocess.CompletedProcess(command, 124, output[0], output[1] + "\ntimed out")


def expect_passed(
    script: str, ranks: int, check: str, legacy_keras: bool = False, *, passing: int | None = None
) -> None:
    """Fail unless the check has passed on every rank, or on so many."""
    job = _jobs(ranks, legacy_keras)[script]
    passed = len(re.findall(rf"PASSED {_module(script)}.{check}$", job.stdout, re.MULTILINE))
    assert passed == (ranks if passing is None else passing), f"{passed} ranks passed; {_tail(job)}"


def expect_clean_exit(script: str, ranks: int, legacy_keras: bool = False) -> None:
    """Fail unless the job has ended well."""
    job = _jobs(ranks, legacy_keras)[script]
    assert job.returncode == 0, _tail(job)


def _tail(job: subprocess.CompletedProcess[str]) -> str:
    return f"exit status {job.returncode}\n{job.stdout[-3000:]}\n{job.stderr[-6000:]}"
