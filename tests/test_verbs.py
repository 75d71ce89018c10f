"""The functions of the frameworks are those that the table of collectives makes."""

from __future__ import annotations

import sys
from pathlib import Path

import polyhvd.numpy as hvd
import pytest

from polyhvd.collectives.functions import Functions
from polyhvd.collectives.table import FAMILIES, PARAMETERS, RAISES, VERBS

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tools"))

import verbs  # noqa: E402

DIALECTS = verbs.dialects()


@pytest.mark.parametrize("name", DIALECTS)
def test_verbs_are_what_the_table_makes(name: str) -> None:
    path = ROOT / "frameworks" / name / "verbs.py"
    assert path.read_text() == verbs.source(DIALECTS[name]), (
        f"{path.relative_to(ROOT)} is not what the table makes: change that or dialect.py, and `make verbs`"
    )


def test_every_verb_has_a_method_and_rows_for_what_it_names() -> None:
    for verb in VERBS.values():
        assert callable(getattr(Functions, verb.name)), verb.name
        family = FAMILIES[verb.family]
        assert set(verb.without) <= set(family.order), verb.name
        assert set(verb.texts) <= set(family.order), verb.name
        assert set(family.order) <= set(PARAMETERS), family.name
        assert set(family.raises) | set(verb.raises or ()) <= set(RAISES), verb.name


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_names_verbs_and_families_that_exist(name: str) -> None:
    dialect = DIALECTS[name]
    keys = {*VERBS, *(f"{family}*" for family in FAMILIES), "*", "*_async"}
    assert set(dialect.lacks) <= set(VERBS)
    assert {*dialect.order, *dialect.notes} <= keys
    known = {*PARAMETERS, *(row.name for row in dialect.parameters)}
    assert {item for order in dialect.order.values() for item in order.split()} <= known
    assert {*dialect.without, *dialect.async_without} <= set(PARAMETERS)
    assert set(dialect.raises) <= set(RAISES)
    assert {key.partition(".")[0] for key in dialect.types} <= set(VERBS)


def test_what_is_no_process_set_is_named() -> None:
    hvd.init()
    with pytest.raises(TypeError, match="process_set=3: expected a ProcessSet"):
        hvd.allreduce(1.0, process_set=3)
    hvd.shutdown()
