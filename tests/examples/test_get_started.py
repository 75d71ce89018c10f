"""The programs of docs/get-started.md run before and after their steps."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fork_servers import IMPORTS, SETTINGS, ForkServers  # tests/harness, on the path by tests/conftest.py

from polyhvd.testing.stand_ins import is_installed

ROOT = Path(__file__).resolve().parents[2]
#: The framework that a program's module imports.
FRAMEWORKS = {"keras": "tensorflow"}
LINES_MAX = 10  # that are added, or put in place of others


def programs() -> dict[str, list[str]]:
    """The lines of each program's difference, by the module of polyhvd that it imports."""
    page = (ROOT / "docs" / "get-started.md").read_text()
    blocks = re.findall(r"```diff\n(.*?)```", page, flags=re.DOTALL)
    return {re.findall(r"import polyhvd\.(\w+) as hvd", block)[0]: block.splitlines() for block in blocks}


def test_each_framework_has_a_program_whose_steps_are_few_lines() -> None:
    assert sorted(programs()) == ["jax", "keras", "mxnet", "numpy", "tensorflow", "torch"]
    for module, lines in programs().items():
        assert all(line[:1] in ("+", "-", " ", "") for line in lines), module
        assert sum(line.startswith("+") for line in lines) <= LINES_MAX, module


# First those whose fork servers the examples have used last.
@pytest.mark.parametrize("ranks", [0, 2], ids=["before", "after"])
@pytest.mark.parametrize(
    "module", sorted(programs(), key=lambda name: FRAMEWORKS.get(name, name), reverse=True)
)
def test_program_trains(module: str, ranks: int, fork_servers: ForkServers, tmp_path: Path) -> None:
    framework = FRAMEWORKS.get(module, module)
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    left_out = "-" if ranks else "+"
    lines = [line[1:] for line in programs()[module] if not line.startswith(left_out)]
    if module == "mxnet" and not ranks:
        lines.insert(0, "import polyhvd; polyhvd.make_mxnet_importable()")
    script = tmp_path / "train.py"
    script.write_text("\n".join(lines))
    has_server = framework in IMPORTS and framework != "numpy"
    python = fork_servers.python(2, IMPORTS[framework]) if has_server else [sys.executable]
    launcher = [sys.executable, "-m", "polyhvd.launch", "-np", str(ranks), *python] if ranks else [*python]
    done = subprocess.run(
        [*launcher, str(script)],
        cwd=tmp_path,
        env={**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    found = re.findall(r"epoch (\d): loss ([\d.]+)", done.stdout)
    first, last = ([float(loss) for epoch, loss in found if epoch == which] for which in "04")
    assert len(first) == len(last) == (ranks or 1), done.stdout
    assert max(last) < min(first) / 2, done.stdout
    assert list(tmp_path.glob("model*"))
