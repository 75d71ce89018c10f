"""What users may call: names and signatures of every module are those that were recorded.

A change of the list is a change for users: it belongs in CHANGELOG.md. To record it anew::

    python tests/surface/names.py polyhvd.torch > tests/surface/torch.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pool import Pools, PoolSpec

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))  # of the ranks, too

import names  # noqa: E402

#: The framework whose pool imports a file's modules.
FRAMEWORKS = {
    "numpy": "numpy",
    "torch": "torch",
    "lightning": "torch",
    "tensorflow": "tensorflow",
    "keras": "tensorflow",
    "mxnet": "mxnet",
}


def recorded(name: str) -> dict[str, list[str]]:
    """The lines of each module in a file."""
    modules: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in (FOLDER / f"{name}.txt").read_text().splitlines():
        if line.startswith("["):
            lines = modules.setdefault(line.strip("[]"), [])
        else:
            lines.append(line)
    return modules


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_modules_offer_what_was_recorded(name: str, pools: Pools) -> None:
    pool = pools.get(PoolSpec(FRAMEWORKS[name], (1,)))
    for module, lines in recorded(name).items():
        (found,) = pool.run(names.offered, module)
        assert found == lines, f"{module}: see tests/surface/test_names.py"


#: Modules that users import beside a framework's.
MODULES = {"polyhvd": {"errors"}}


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_dir_shows_what_users_may_call_and_nothing_else(name: str, pools: Pools) -> None:
    pool = pools.get(PoolSpec(FRAMEWORKS[name], (1,)))
    for module in recorded(name):
        if not module.endswith((".callbacks", ".errors", ".launch", ".runner")):
            (found,) = pool.run(names.undeclared, module)
            assert set(found) - set(FRAMEWORKS) == MODULES.get(module, set()), module


def test_every_module_is_recorded() -> None:
    folders = {
        path.name for path in (FOLDER.parents[1] / "frameworks").iterdir() if (path / "__init__.py").is_file()
    }
    assert folders - {"cupy"} == set(FRAMEWORKS), "of CuPy's module tests/gpu/cupy_names.py looks after"
