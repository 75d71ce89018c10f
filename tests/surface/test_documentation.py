"""``help()`` is enough to use what is public: every argument, every error and an example are documented."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pool import Pools

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))  # of the ranks, too

import documentation  # noqa: E402
from test_names import FRAMEWORKS, pool_of, recorded  # noqa: E402

#: Its fields are the rows of docs/configuration.md.
ELSEWHERE = {"Settings"}


@pytest.mark.parametrize("name", FRAMEWORKS, scope="session")
def test_what_is_public_is_documented(name: str, pools: Pools) -> None:
    pool = pool_of(name, pools)
    lacking: dict[str, list[str]] = {}
    for module in recorded(name):
        if not module.endswith((".callbacks", ".errors", ".launch", ".runner")):
            (found,) = pool.run(documentation.lacking, module)
            lacking |= found
    for item in ELSEWHERE:
        lacking.pop(item, None)
    assert not lacking


@pytest.mark.parametrize("name", [name for name in FRAMEWORKS if FRAMEWORKS[name] == name], scope="session")
def test_examples_of_collectives_run(name: str, pools: Pools) -> None:
    pool = pool_of(name, pools)
    assert pool.run(documentation.run_examples, f"polyhvd.{name}.verbs") == [[]]
