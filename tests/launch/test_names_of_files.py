"""polyhvdrun and ranks where names of files are no UTF-8."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from launching import ROOT

PROGRAM = (
    "import numpy, sys\n"
    "import polyhvd.numpy as hvd\n"
    "hvd.init()\n"
    "x = hvd.allreduce(numpy.ones(2) + hvd.rank(), op=hvd.Sum)\n"
    "assert hvd.broadcast_object({'rank': hvd.rank()}, 1) == {'rank': 1}\n"
    "print(x[0])\n"
)


@pytest.mark.parametrize("locale", ["C.UTF-8", "C", "POSIX"])
def test_script_folder_and_output_may_have_any_names(tmp_path: Path, locale: str) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/f\xe4lder"))
    folder.mkdir()
    script = Path(os.fsdecode(os.fsencode(folder) + b"/tr\xffain.py"))
    script.write_text(PROGRAM)
    logs = Path(os.fsdecode(os.fsencode(folder) + b"/l\xfegs"))
    command = ["-m", "polyhvd.launch", "-v", "-np", "2", "--output-filename", str(logs), sys.executable]
    result = subprocess.run(
        [sys.executable, *command, script.name],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "LC_ALL": locale},
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [b"[0] 3.0", b"[1] 3.0"]
    assert (logs / "rank.1" / "stdout").read_text() == "3.0\n"


def test_program_that_cannot_be_run_is_named_whatever_its_name(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "polyhvd.launch", "-np", "1", b"/no/such\xff"],
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 127
    assert b"/no/such" in result.stderr
    assert b"Traceback" not in result.stderr
