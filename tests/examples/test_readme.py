"""The README's programs run as they stand there."""

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


def programs() -> dict[str, str]:
    """The programs in the README, by the module of polyhvd that they import."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    examples = [block for block in blocks if "hvd.init()" in block]
    return {re.findall(r"import polyhvd\.([\w.]+) as hvd", program)[0]: program for program in examples}


def test_the_readme_has_an_example_for_each_framework() -> None:
    assert sorted(programs()) == ["keras", "mxnet", "numpy", "tensorflow", "torch"]
    longest = max(programs().values(), key=len)
    assert len([line for line in longest.splitlines() if line]) <= 15, "about ten lines"


# First those whose fork servers the examples have used last.
@pytest.mark.parametrize(
    "module", sorted(programs(), key=lambda name: FRAMEWORKS.get(name, name), reverse=True)
)
def test_example_of_the_readme_runs_on_two_ranks(
    module: str, fork_servers: ForkServers, tmp_path: Path
) -> None:
    framework = FRAMEWORKS.get(module, module)
    if not is_installed(framework):
        pytest.skip(f"{framework} is not installed")
    script = tmp_path / "train.py"
    script.write_text(programs()[module])
    python = [sys.executable] if framework == "numpy" else fork_servers.python(2, IMPORTS[framework])
    done = subprocess.run(
        [sys.executable, "-m", "polyhvd.launch", "-np", "2", *python, str(script)],
        cwd=ROOT,
        env={**os.environ, **SETTINGS},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    losses = re.findall(r"loss on this rank: ([\d.]+)", done.stdout)
    assert len(set(losses)) == 2, f"ranks trained on the same rows: {done.stdout}"
