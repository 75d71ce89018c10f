"""What users may call: names and signatures of every module are those that were recorded.

A change of the list is a change for users: it belongs in CHANGELOG.md. To record it anew::

    python tests/surface/names.py polyhvd.torch > tests/surface/torch.txt
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pool import Pool, Pools, PoolSpec

from polyhvd.installed import frameworks
from polyhvd.testing.stand_ins import is_installed

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))  # of the ranks, too

import names  # noqa: E402

SOURCES = FOLDER.parents[1] / "frameworks"

#: The framework whose pool imports a file's modules; tests of one pool follow each other.
FRAMEWORKS = {path.stem: (*frameworks()[path.stem].stands_on, path.stem)[0] for path in FOLDER.glob("*.txt")}
_ORDER = ("numpy", "torch", "tensorflow", "mxnet")  # the tests before these have used the first ones' servers
FRAMEWORKS = dict(
    sorted(FRAMEWORKS.items(), key=lambda pair: (_ORDER.index(pair[1]) if pair[1] in _ORDER else 9, pair[0]))
)


def pool_of(name: str, pools: Pools) -> Pool:
    """The rank that imports a file's modules, if it can."""
    if not is_installed(FRAMEWORKS[name]):
        pytest.skip(f"{FRAMEWORKS[name]} is not installed")
    return pools.get(PoolSpec(FRAMEWORKS[name], (1,)))


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


@pytest.mark.parametrize("name", FRAMEWORKS, scope="session")
def test_modules_offer_what_was_recorded(name: str, pools: Pools) -> None:
    pool = pool_of(name, pools)
    for module, lines in recorded(name).items():
        (found,) = pool.run(names.offered, module)
        assert found == lines, f"{module}: see tests/surface/test_names.py"


#: Modules that users import beside a framework's.
MODULES = {"polyhvd": {"errors"}}


@pytest.mark.parametrize("name", FRAMEWORKS, scope="session")
def test_dir_shows_what_users_may_call_and_nothing_else(name: str, pools: Pools) -> None:
    pool = pool_of(name, pools)
    for module in recorded(name):
        if not module.endswith((".callbacks", ".errors", ".launch", ".runner")):
            (found,) = pool.run(names.undeclared, module)
            assert set(found) - set(FRAMEWORKS) == MODULES.get(module, set()), module


@pytest.mark.skipif(not SOURCES.is_dir(), reason="no checkout")
def test_every_module_is_recorded() -> None:
    folders = {path.name for path in SOURCES.iterdir() if (path / "__init__.py").is_file()}
    assert folders - {"cupy"} == set(FRAMEWORKS), "of CuPy's module tests/gpu/cupy_names.py looks after"
