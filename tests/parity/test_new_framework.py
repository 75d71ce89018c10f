"""A framework needs nothing but its folder: a copy of one passes this suite under another name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import polyhvd
from polyhvd.collectives.table import generator
from polyhvd.testing.stand_ins import is_installed

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
NAME = "renamed"


def installed_with_a_copy(original: str, folder: Path) -> None:
    """Make a folder the package as it is installed, with a copy of one framework beside it."""
    package = folder / "polyhvd"
    package.mkdir()
    for path in [*Path(polyhvd.__file__).parent.iterdir(), *(ROOT / "frameworks").glob("*/")]:
        if path.name != "__pycache__" and not (package / path.name).exists():
            (package / path.name).symlink_to(path)
    made = shutil.ignore_patterns("__pycache__", "verbs.py")
    shutil.copytree(ROOT / "frameworks" / original, package / NAME, ignore=made)
    for path in (package / NAME).glob("*.py"):
        path.write_text(path.read_text().replace(f"polyhvd.{original}", f"polyhvd.{NAME}"))
    generator.write(package, [NAME])


@pytest.mark.skipif(
    not (ROOT / "frameworks").is_dir(), reason="an installed package has no folder frameworks/ to copy"
)
@pytest.mark.parametrize(
    ("original", "files"),
    [
        ("numpy", ["test_gather_and_broadcast.py", "test_surface.py"]),
        pytest.param("numpy", ["."], marks=pytest.mark.nightly),
        pytest.param("jax", ["."], marks=pytest.mark.nightly),
    ],
)
def test_a_copy_of_a_framework_passes_the_suite(original: str, files: list[str], tmp_path: Path) -> None:
    if not is_installed(original):
        pytest.skip(f"{original} is not installed")
    installed_with_a_copy(original, tmp_path)
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    paths = [str(FOLDER / file) for file in files]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", f"{NAME}-", *paths],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "TEST_RANKS": "fewest"},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
