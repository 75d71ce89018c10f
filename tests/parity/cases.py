"""Cases of ``polyhvd parity`` in the processes of a framework, as the command runs them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import drivers

from polyhvd.parity import running
from polyhvd.parity.case import Case
from polyhvd.parity.catalogue import CASES
from polyhvd.parity.runs import Run

__all__ = ["case_of", "run", "runs_of"]


def case_of(name: str, options: dict[str, Any]) -> Case:
    """A case of the catalogue with another optimizer."""
    case = CASES[name]
    return replace(case, optimizer=replace(case.optimizer, **options))


def run(
    framework: str, case: Case, steps: int, mode: str = "plain", process_set: Any = None, rank: int = 0
) -> Run:
    """One run."""
    made = Run(framework, mode)
    session = running.session_of(framework, case, process_set, synchronized=mode == "all")
    part = (rank, process_set.size()) if mode == "all" else (0, 1)
    running.train(session, made, steps, part, lambda: None)
    return made


def runs_of(name: str, case: str, options: dict[str, Any], steps: int) -> list[Run]:
    """What a rank sees: alone, on the first rank, and on all of them."""
    driver = drivers.get(name)
    if driver.framework == "mxnet":
        import mxnet as mx

        mx.util.set_np_shape(False)  # as Gluon has it; other tests of this process change it
    found = []
    chosen, hvd = case_of(case, options), driver.hvd
    if hvd.rank() == 0:
        found.append(run(driver.framework, chosen, steps))
    found.append(run(driver.framework, chosen, steps, "all", hvd.global_process_set, hvd.rank()))
    return found
