"""Scripts written for Horovod, as its documentation shows, with nothing changed but its name."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fork_servers import IMPORTS, SETTINGS, ForkServers

SCRIPTS = Path(__file__).parent / "scripts"
RANKS, TIMEOUT_S = 2, 240

pytest.importorskip("tensorflow", reason="TensorFlow is not installed")
keras_2 = pytest.mark.skipif(importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed")


@pytest.mark.parametrize(
    ("script", "arguments", "environment"),
    [
        pytest.param("keras_fit.py", (), {}, id="keras_fit"),
        pytest.param("keras_fit.py", (), {"TF_USE_LEGACY_KERAS": "1"}, id="keras2_fit", marks=keras_2),
        pytest.param("custom_loop.py", (), {}, id="custom_loop"),
        pytest.param("custom_loop.py", (), {"TF_USE_LEGACY_KERAS": "1"}, id="keras2_loop", marks=keras_2),
        pytest.param("graph_v1.py", ("1",), {}, id="graph_v1"),
        pytest.param("graph_v1.py", ("2",), {}, id="graph_v1_in_passes"),
    ],
)
def test_a_script_for_horovod_trains(
    script: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    tmp_path: Path,
    fork_servers: ForkServers,
) -> None:
    program = tmp_path / script
    program.write_text(re.sub(r"\bhorovod\b", "polyhvd", (SCRIPTS / script).read_text()))
    (tmp_path / "run").mkdir()
    python = fork_servers.python(RANKS, IMPORTS["tensorflow"], **environment)
    done = subprocess.run(
        [sys.executable, "-m", "polyhvd.launch", "-np", str(RANKS), *python, str(program), *arguments],
        cwd=tmp_path / "run",
        env={**os.environ, **SETTINGS, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    results = re.findall(r"RESULT (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
    assert len(results) == RANKS
    assert len(set(results)) == 1, f"ranks differ: {results}"
