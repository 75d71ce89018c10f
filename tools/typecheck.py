"""Runs mypy --strict over all of polyhvd, its frameworks' modules included, and over programs of users.

mypy does not see where an editable installation takes polyhvd.torch from, so all is put into one folder,
as it is when it is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TREE = ROOT / "build" / "typing"


def tree() -> Path:
    """A folder with the package as it is installed, and the programs, made of links."""
    package = TREE / "polyhvd"
    shutil.rmtree(TREE, ignore_errors=True)
    package.mkdir(parents=True)
    frameworks = [path.parent for path in (ROOT / "frameworks").glob("*/__init__.py")]
    for path in [*(ROOT / "polyhvd").iterdir(), *frameworks]:
        (package / path.name).symlink_to(path)
    for path in (ROOT / "tests" / "typing").glob("*_program.py"):
        (TREE / path.name).symlink_to(path)
    return TREE


def main() -> int:
    """The exit status of mypy."""
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    mypy += ["--cache-dir", str(ROOT / "build" / "mypy")]
    environment = {**os.environ, "MYPYPATH": str(tree())}
    programs = sorted(path.name for path in TREE.glob("*_program.py"))
    for what in (["-p", "polyhvd"], programs):
        status = subprocess.run([*mypy, *what], cwd=TREE, env=environment).returncode
        if status:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
