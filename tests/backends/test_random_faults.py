"""Random faults in random jobs: each case ends in right results, or in an error on every rank.

A case comes from its number alone. ``make faults`` runs FAULT_CASES of them (300), the ordinary suite
40; ``POLYHVD_TEST_FAULT_SEED=123 pytest tests/backends/test_random_faults.py`` runs the one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from fault_cases import case_of
from fault_runner import Server, run_case

_FIRST = 1
_CASES = int(os.environ.get("POLYHVD_TEST_FAULT_CASES", "40"))
_SEED = os.environ.get("POLYHVD_TEST_FAULT_SEED")
_SEEDS = [int(_SEED)] if _SEED else range(_FIRST, _FIRST + _CASES)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize("seed", _SEEDS)
def test_a_fault_ends_in_right_results_or_an_error_on_every_rank(
    server: Server, seed: int, tmp_path: Path
) -> None:
    case = case_of(seed)
    print(case)
    print(run_case(server, case, tmp_path))
