"""Random faults in random jobs: each case ends in right results, or in an error on every rank.

A case comes from its seed alone, which is in the test's name. Each session draws new seeds:
``make faults`` runs FAULT_CASES of them (300), ``make test`` 12. The first few also run as a user who is not
root, and with every core of the machine busy.
``POLYHVD_TEST_FAULT_SEED=123 pytest tests/backends/test_random_faults.py`` repeats one case.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from elastic_faults import elastic_case_of, run_elastic_case
from fault_cases import case_of
from fault_runner import Server, run_case
from launching import Launcher

_CASES = int(os.environ.get("POLYHVD_TEST_FAULT_CASES") or "12")
_SEED = os.environ.get("POLYHVD_TEST_FAULT_SEED")
_FIRST = int(_SEED) if _SEED else secrets.randbelow(1_000_000_000)
_SEEDS = range(_FIRST, _FIRST + (1 if _SEED else _CASES))
_FEW = _SEEDS[:4]
_ELASTIC = _SEEDS[::10]  # jobs of polyhvdrun, which take a second or two to start
_NOBODY = 65534
#: It competes with the ranks on their own terms, and does not outlive this process.
_BUSY = "import ctypes; ctypes.CDLL(None).prctl(1, 9)\nwhile True: pass"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture(scope="module")
def server_of_nobody() -> Iterator[Server]:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user, and all the others are no root")
    server = Server(_NOBODY)
    yield server
    server.close()


@pytest.fixture(scope="module")
def busy_cores() -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in os.sched_getaffinity(0)]
    yield
    for process in busy:
        process.kill()
        process.wait()


@pytest.mark.parametrize("seed", _SEEDS)
def test_a_fault_ends_in_right_results_or_an_error_on_every_rank(
    server: Server, seed: int, tmp_path: Path
) -> None:
    case = case_of(seed)
    print(case)
    print(run_case(server, case, tmp_path))


@pytest.mark.parametrize("seed", _FEW)
def test_a_fault_ends_so_for_a_user_who_is_not_root(
    server_of_nobody: Server, seed: int, tmp_path: Path
) -> None:
    for folder in (tmp_path, *tmp_path.parents[:-2]):  # it is to get there
        folder.chmod(folder.stat().st_mode | 0o011)
    folder = tmp_path / "of nobody"
    folder.mkdir()
    os.chown(folder, _NOBODY, _NOBODY)
    case = case_of(seed)
    print(case)
    print(run_case(server_of_nobody, case, folder))


@pytest.mark.parametrize("seed", _FEW)
def test_a_fault_ends_so_on_a_machine_whose_cores_are_busy(
    server: Server, busy_cores: None, seed: int, tmp_path: Path
) -> None:
    case = case_of(seed)
    print(case)
    print(run_case(server, case, tmp_path))


@pytest.mark.parametrize("seed", _ELASTIC)
def test_a_fault_in_an_elastic_job_ends_in_right_numbers_or_a_named_error(seed: int, tmp_path: Path) -> None:
    print(run_elastic_case(elastic_case_of(seed), Launcher(tmp_path), tmp_path))
