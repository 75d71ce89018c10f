"""Jobs of TensorFlow and Keras that lose a rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from launching import Launcher

from polyhvd.testing.stand_ins import is_installed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed"),
]

FOLDER = Path(__file__).parent


@pytest.mark.parametrize("script", ["horovod_tensorflow", "horovod_keras"])
def test_script_of_horovod_s_documentation_goes_on(launcher: Launcher, tmp_path: Path, script: str) -> None:
    options = ("-np", "2", "--min-np", "1", "-x", "CUDA_VISIBLE_DEVICES=-1", "-x", "TF_CPP_MIN_LOG_LEVEL=3")
    command = [*launcher.python("tensorflow"), str(FOLDER / f"{script}.py"), str(tmp_path / "killed")]
    status, out, err = launcher.run(*options, argv=command)
    assert status == 0, err
    ends = re.findall(r"end .*", out)
    assert ends
    assert ends == len(ends) * ends[:1]  # the same weights, moments and counts
    losses = [float(text) for line in re.findall(r"losses (.*)", out) for text in line.split()]
    assert min(losses) < losses[0] / 2  # the last may be of the few rows that were left when a process joined
    assert "process 1 on localhost was killed by SIGKILL; the job continues" in err
    assert f"[0] {ends[0]}" in out, "the survivor has gone on"
