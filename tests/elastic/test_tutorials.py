"""The programs of docs/elastic-tutorials.md, with a rank killed by hand."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from launching import Launcher
from test_train import ranks_of

from polyhvd.testing.stand_ins import is_installed

PAGE = Path(__file__).resolve().parents[2] / "docs" / "elastic-tutorials.md"
PROGRAMS = dict(re.findall(r"```python\n# elastic tutorial: ([^\n]*)\n(.*?)```", PAGE.read_text(), re.DOTALL))
DEADLINE_S = 150.0  # for liveness only: frameworks take long to start on a busy machine


def test_there_is_a_tutorial_for_each_framework() -> None:
    assert list(PROGRAMS) == ["numpy", "torch", "mxnet", "keras", "keras fit", "tensorflow", "lightning"]


#: Each in fresh interpreters. The others' frameworks have examples of the same kind in test_train.py.
WHEN = {"numpy": (), "keras fit": pytest.mark.slow, "lightning": pytest.mark.slow}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=WHEN.get(name, pytest.mark.nightly)) for name in PROGRAMS]
)
def test_program_goes_on_when_a_rank_is_killed(launcher: Launcher, tmp_path: Path, name: str) -> None:
    if not is_installed(name.split()[0]):
        pytest.skip(f"{name} is not installed")
    program = PROGRAMS[name].replace("epochs=20", "epochs=8")
    script = launcher.script(f"import os\nos.chdir({str(tmp_path)!r})\n{program}")
    # In fresh interpreters, as a user has them.
    launcher.start("-np", "2", "--min-np", "1", argv=[sys.executable, script])
    process = launcher.process
    assert process is not None
    deadline = time.monotonic() + DEADLINE_S
    # Lightning says only that it begins, where no terminal is.
    while not re.search(rb"(?i)epoch 2\b|Total FLOPs", launcher.out + launcher.err):
        assert time.monotonic() < deadline, f"{launcher.out!r}\n{launcher.err!r}"
        launcher._read(process, deadline)
    os.kill(ranks_of(script)[0], signal.SIGKILL)
    status, out, err = launcher.finish(DEADLINE_S)
    assert status == 0, err
    assert "was killed by SIGKILL; the job continues" in err
    (accuracy,) = re.findall(r"accuracy ([\d.]+)", out)
    assert float(accuracy) > 0.95
    if name not in ("keras fit", "lightning"):
        assert "epoch 8/8" in err
        assert (tmp_path / "run").is_dir()
