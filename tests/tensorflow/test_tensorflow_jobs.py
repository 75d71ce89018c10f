"""Jobs of their own: scripts written for Horovod, a rank that is killed, Keras on another backend."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fork_servers import IMPORTS, SETTINGS, ForkServers
from pool import Pool, PoolSpec

from polyhvd.testing.stand_ins import is_installed

SCRIPTS = Path(__file__).parent / "scripts"
RANKS, TIMEOUT_S = 2, 240

pytestmark = pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed")


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        pytest.param("keras_fit.py", (), id="keras_fit", marks=pytest.mark.slow),
        pytest.param("custom_loop.py", (), id="custom_loop"),
        pytest.param("graph_v1.py", ("1",), id="graph_v1"),
        pytest.param("graph_v1.py", ("2",), id="graph_v1_in_passes"),
    ],
)
def test_a_script_for_horovod_trains(
    script: str,
    arguments: tuple[str, ...],
    tmp_path: Path,
    fork_servers: ForkServers,
) -> None:
    program = tmp_path / script
    program.write_text(re.sub(r"\bhorovod\b", "polyhvd", (SCRIPTS / script).read_text()))
    (tmp_path / "run").mkdir()
    python = fork_servers.python(RANKS, IMPORTS["tensorflow"])
    done = subprocess.run(
        [sys.executable, "-m", "polyhvd.launch", "-np", str(RANKS), *python, str(program), *arguments],
        cwd=tmp_path / "run",
        env={**os.environ, **SETTINGS},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    results = re.findall(r"RESULT (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    assert len(results) == RANKS
    assert len(set(results)) == 1, f"ranks differ: {results}"


def test_a_lost_rank_is_told_in_a_graph(fork_servers: ForkServers) -> None:
    with Pool(PoolSpec("tensorflow", (4,)), fork_servers) as pool:
        pool.start("test_tensorflow_errors:lose_a_rank")
        for rank in range(3):
            pool.answer(rank)


def test_keras_on_another_backend_is_refused_with_advice(tmp_path: Path) -> None:
    """With a stand-in for Keras, since JAX is not installed here."""
    (tmp_path / "keras.py").write_text("class backend:\n    backend = staticmethod(lambda: 'jax')\n")
    job = subprocess.run(
        [sys.executable, "-c", "import polyhvd.keras"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert job.returncode != 0
    assert "runs on jax: set KERAS_BACKEND=tensorflow or KERAS_BACKEND=torch" in job.stderr
