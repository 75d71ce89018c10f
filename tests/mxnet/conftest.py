"""Worlds of MXNet ranks: each test hands a function of its own file to a few processes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_servers import IMPORTS, SETTINGS, ForkServers  # tests/harness, on the path by tests/conftest.py

FOLDER = Path(__file__).resolve().parent
DEADLINE_S = 180.0  # for hangs only

if importlib.util.find_spec("mxnet") is None:
    collect_ignore_glob = ["test_*.py"]

Program = Callable[..., None]


@pytest.fixture
def python_of_ranks(fork_servers: ForkServers) -> Callable[[int], list[str]]:
    """The interpreter of a job of so many ranks, for programs that import MXNet."""
    return lambda number: fork_servers.python(number, IMPORTS["mxnet"])


@pytest.fixture
def ranks(tmp_path: Path, python_of_ranks: Callable[[int], list[str]]) -> Callable[..., str]:
    """``ranks(n, program, MXNET_X="1")`` runs ``program(hvd, mx, np)`` on n ranks; returns their output.

    A program that raises on a rank fails the test. ``POLYHVD_TEST_FOLDER`` is a folder of the test. MXNet
    is imported once for all tests, and once more where it must see an environment of the test.
    """

    def run(number: int, program: Program, **environment: str) -> str:
        python = [sys.executable]
        if not environment:
            python = python_of_ranks(number)
        command = [sys.executable, "-m", "polyhvd.launch", "-np", str(number), *python]
        command += [str(FOLDER / "mxnet_rank.py"), program.__code__.co_filename]
        process = subprocess.Popen(
            [*command, program.__name__],
            env={**os.environ, **SETTINGS, "POLYHVD_TEST_FOLDER": str(tmp_path), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            output, _ = process.communicate(timeout=30)
            pytest.fail(f"the ranks hang; they said:\n{output}")
        assert process.returncode == 0, output
        return output

    return run
