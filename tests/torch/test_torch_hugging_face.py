"""The example with a Trainer of Hugging Face's transformers. The matrix has an environment with it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hugging_face_trainer.py"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="needs transformers; tools/matrix.py hugging-face",
)


def train(ranks: int, folder: Path, *options: str) -> list[str]:
    """The line of each rank."""
    command = [
        sys.executable,
        "-m",
        "polyhvd.launch",
        "-np",
        str(ranks),
        "--no-tag",
        sys.executable,
        str(EXAMPLE),
    ]
    words = [*command, "--in-order", "--epochs", "2", "--output", str(folder), *options]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    return sorted(re.findall(r"^rank .*", done.stdout, re.MULTILINE))


@pytest.mark.parametrize("accumulate", ["1", "2"])
def test_training_on_two_ranks_is_that_of_one_with_the_joined_batch(accumulate: str, tmp_path: Path) -> None:
    both = train(2, tmp_path / "two", "--batch-size", "16", "--accumulate", accumulate)
    (joined,) = train(1, tmp_path / "one", "--batch-size", "32", "--accumulate", accumulate)
    weights = [line.partition("weights ")[2] for line in (*both, joined)]
    assert weights[0] == weights[1]
    assert float(weights[0]) == pytest.approx(float(weights[2]), abs=0.01)
    for line in both:
        first, last = map(float, re.findall(r"loss ([\d.]+) to ([\d.]+)", line)[0])
        assert last < first
    steps = 512 // (32 * int(accumulate))
    names = sorted(path.name for path in (tmp_path / "two").iterdir())
    assert names == sorted([f"checkpoint-{steps}", f"checkpoint-{2 * steps}"])  # by rank 0
