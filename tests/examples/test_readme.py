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
    assert len([line for line in longest.splitlines() if line]) <= 22, "about twenty lines"


#: "rank 0 of 2, step 10: loss 1.228"
PRINTED = re.compile(r"rank (\d) of 2, (?:step|epoch) (\d+): loss ([\d.]+)")


def losses(text: str) -> dict[str, list[float]]:
    """What each rank has printed, in its order."""
    found: dict[str, list[float]] = {}
    for rank, _, loss in PRINTED.findall(text):
        found.setdefault(rank, []).append(float(loss))
    return found


def test_every_program_of_the_readme_shards_its_data_and_uses_its_own_gpu() -> None:
    for program in programs().values():
        assert program.count("[hvd.rank() :: hvd.size()]") == 2
    assert "torch.cuda.set_device(hvd.local_rank())" in programs()["torch"]
    (before_keras,) = re.findall(r"^(Keras.*:)\n\n```python", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert "torch.cuda.set_device(hvd.local_rank())" in before_keras  # TensorFlow does not use GPUs


def test_the_readme_begins_with_two_sentences() -> None:
    title, first, _ = (ROOT / "README.md").read_text().split("\n\n", maxsplit=2)
    assert title == "# polyhvd"
    assert len(re.findall(r"\.(?= |\n|$)", first)) == 2


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
    found = losses(done.stdout)
    assert sorted(found) == ["0", "1"], done.stdout
    for printed in found.values():
        assert len(printed) == 4, done.stdout
        assert printed[-1] < printed[0] / 2, f"the loss does not fall: {done.stdout}"
    assert found["0"] != found["1"], f"ranks trained on the same rows: {done.stdout}"
    if module == "torch":  # whose output is in the README
        shown = losses((ROOT / "README.md").read_text())
        assert found == {rank: pytest.approx(values, rel=0.05) for rank, values in shown.items()}
