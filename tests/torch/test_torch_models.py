"""Real models on several ranks, against one process with the joined batch; a script written for Horovod."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fork_servers import IMPORTS, SETTINGS, ForkServers
from on_ranks import Functions
from pool import Pool

cases = Functions("torch_models_cases")
HERE = Path(__file__).resolve().parent


@pytest.mark.sizes(2)
@pytest.mark.parametrize("name", ["mlp", "resnet18", "lstm", "transformer"])
def test_a_model_trains_as_in_one_process_on_the_joined_batch(ranks: Pool, name: str) -> None:
    ranks.run(cases.trains_like_one_process, name, deadline_s=240.0)


def test_a_script_for_horovod_runs_with_another_import(fork_servers: ForkServers, tmp_path: Path) -> None:
    """Two epochs, then two more from the checkpoint: it resumes, learns, and ranks agree on every figure."""
    figures = []
    for epochs in ("2", "4"):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "polyhvd.launch", "-np", "2"),
                *(*fork_servers.python(2, IMPORTS["torch"]), str(HERE / "horovod_script.py")),
                *("--epochs", epochs),
                *("--checkpoints", str(tmp_path)),
            ],
            cwd=HERE.parents[1],
            env={**os.environ, **SETTINGS},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        figures.append([line.split("] ", 1)[1] for line in done.stdout.splitlines() if "accuracy" in line])
    first, second = figures
    assert sorted(first) == sorted(2 * sorted({*first}))
    assert {line.split()[1] for line in first} == {"0", "1"}
    assert {line.split()[1] for line in second} == {"2", "3"}, "the second run has not resumed"
    assert len({*second}) == 2, "the ranks disagree"
    accuracy = max(float(line.split()[-1]) for line in second)
    assert accuracy > 0.8
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"epoch-{n}.pt" for n in range(4)]
