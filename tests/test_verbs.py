"""The functions of the frameworks are those that the tables of collectives and options make."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polyhvd.numpy as hvd
import pytest

from polyhvd.collectives.adapter import ReduceOp
from polyhvd.collectives.functions import Functions
from polyhvd.collectives.process_sets import global_process_set
from polyhvd.collectives.table import FAMILIES, PARAMETERS, RAISES, VERBS, generator
from polyhvd.collectives.table.options import OPTIONS
from polyhvd.training.compression import NO_COMPRESSION
from polyhvd.training.options import Options

ROOT = Path(__file__).resolve().parents[1]
DIALECTS = generator.dialects(ROOT / "frameworks")
MADE = [f"{name}/verbs.py" for name in DIALECTS]
MADE += [f"{name}/wrappers.py" for name in generator.signatures(ROOT / "frameworks")]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the table and of what frameworks add to it, without what is made of it and without a core."""
    ignored = shutil.ignore_patterns("__pycache__")
    table = Path("polyhvd/collectives/table")
    shutil.copytree(ROOT / table, tmp_path / table, ignore=ignored)
    for source in ("dialect.py", "signatures.py"):
        for path in (ROOT / "frameworks").rglob(source):
            copy = tmp_path / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, copy)
    return tmp_path


def made(checkout: Path, *names: str) -> list[str]:
    """Lines of the generator in a Python without packages."""
    script = checkout / "polyhvd/collectives/table/generator.py"
    # -B: compiled files of a text that has changed within a second, to one of the same length, would be used.
    command = [sys.executable, "-I", "-S", "-B", str(script), *names]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_verbs_are_made_without_a_core_and_without_packages(checkout: Path) -> None:
    assert made(checkout) == [f"wrote frameworks/{path}" for path in MADE]
    for path in MADE:
        assert (checkout / "frameworks" / path).read_bytes() == (ROOT / "frameworks" / path).read_bytes()


def test_verbs_are_made_again_when_the_table_or_a_dialect_has_changed(checkout: Path) -> None:
    made(checkout)
    assert made(checkout) == []
    dialect = checkout / "frameworks" / "torch" / "dialect.py"
    dialect.write_text(dialect.read_text().replace('title="PyTorch"', 'title="Changed"'))
    assert made(checkout) == ["wrote frameworks/torch/verbs.py"]
    table = checkout / "polyhvd/collectives/table/verbs.py"
    table.write_text(table.read_text().replace("a rank was lost", "a rank is gone"))
    assert made(checkout, "numpy") == ["wrote frameworks/numpy/verbs.py"]
    assert "wrote frameworks/torch/verbs.py" in made(checkout)
    options = checkout / "polyhvd/collectives/table/options.py"
    options.write_text(options.read_text().replace("begins the names of", "is before the names of"))
    wrappers = [
        f"wrote frameworks/{name}/wrappers.py" for name in ("keras", "tensorflow", "tensorflow/keras")
    ]
    assert made(checkout) == wrappers
    assert made(checkout) == []


def test_make_makes_verbs_that_are_missing_or_older_than_the_table(checkout: Path) -> None:
    shutil.copy(ROOT / "Makefile", checkout)
    make = ["make", "-C", str(checkout), "--no-print-directory", f"PY={sys.executable}", "verbs"]

    def lines() -> list[str]:
        done = subprocess.run(make, check=True, capture_output=True, text=True).stdout.splitlines()
        return [line for line in done if line.startswith("wrote")]

    assert len(lines()) == len(MADE)
    assert lines() == []
    frameworks = checkout / "frameworks"
    (frameworks / "numpy" / "verbs.py").unlink()
    (frameworks / "tensorflow" / "keras" / "wrappers.py").unlink()
    dialect = frameworks / "torch" / "dialect.py"
    dialect.write_text(dialect.read_text().replace('title="PyTorch"', 'title="Changed"'))
    newer = (frameworks / "torch" / "verbs.py").stat().st_mtime + 1
    os.utime(dialect, (newer, newer))
    expected = ["numpy/verbs.py", "tensorflow/keras/wrappers.py", "torch/verbs.py"]
    assert sorted(lines()) == [f"wrote frameworks/{path}" for path in expected]


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


def test_the_table_of_options_has_the_fields_of_options_and_their_defaults() -> None:
    assert set(OPTIONS) == {field.name for field in fields(Options)}
    known: dict[str, Any] = {"ReduceOp": ReduceOp, "global_process_set": global_process_set}
    known["Compression"] = SimpleNamespace(none=NO_COMPRESSION)
    for field in fields(Options):
        default = OPTIONS[field.name].default
        assert default is not None
        assert eval(default, known) == field.default, field.name


def test_what_is_no_process_set_is_named() -> None:
    hvd.init()
    with pytest.raises(TypeError, match="process_set=3: expected a ProcessSet"):
        hvd.allreduce(1.0, process_set=3)
    hvd.shutdown()
