"""What ``polyhvd parity`` writes, when it is ended in the middle and when there is no room."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import wait_until  # tests/harness, on the path by tests/conftest.py
from ranks_alive import outliving_sigkill

from polyhvd.parity import jobs
from polyhvd.parity.folders import NoRoomError, work_folder
from polyhvd.parity.statuses import STATUSES

ROOT = Path(__file__).resolve().parents[1]

CASE = """
import numpy as np
from polyhvd.parity import layers

def build(framework):
    return [layers.dense(4, 6), layers.activation("tanh"), layers.dense(6, 3)]

def batch(framework, step):
    WAITS
    inputs = np.random.default_rng(step).standard_normal((12, 4))
    return inputs, inputs[:, :3].argmax(axis=1)
"""


def _below(folder: Path) -> list[int]:
    """Processes that have to do with a case in this folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            words = path.with_name("cmdline").read_bytes() + path.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words:
            found.append(int(path.parent.name))
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_command_that_is_ended(tmp_path: Path, number: int) -> None:
    begun = tmp_path / "begun"
    waits = f"    import pathlib, time\n    pathlib.Path({str(begun)!r}).touch()\n    time.sleep(600)\n"
    case = tmp_path / "waits.py"
    case.write_text(CASE.replace("    WAITS\n", waits))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {**os.environ, "TMPDIR": str(temporary)}
    words = [sys.executable, "-m", "polyhvd.cli", "parity", str(case), "--frameworks", "numpy"]
    process = subprocess.Popen(words, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(begun.exists, "the case to be running", deadline_s=60)
        assert len(_below(tmp_path)) > 2
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        assert process.returncode == (130 if number == signal.SIGINT else -number), errors
        wait_until(lambda: not _below(tmp_path), "all processes to end", deadline_s=60)
        assert not list(temporary.glob("polyhvd-parity-*"))
    finally:
        process.kill()


SCRIPT = """
import numpy as np
import polyhvd.numpy as hvd
from polyhvd import parity

hvd.init()
for step in range(1000):
    parity.compare(f"{step} of a name that takes some room", np.ones(3))
"""


@pytest.mark.parametrize("words", ["mlp --frameworks numpy --steps 20", "--scripts SCRIPT SCRIPT"])
def test_a_full_folder_for_temporary_files_is_reported_in_one_line(words: str, small_disk: Path) -> None:
    script = small_disk.parent / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "polyhvd.cli", "parity", *words.replace("SCRIPT", str(script)).split()],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(small_disk)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == STATUSES["no-room"], done.stdout + done.stderr
    assert done.stderr == (
        f"polyhvd parity: no room in TMPDIR, which is {small_disk}: free some of it, or set TMPDIR to a "
        "folder with more\n"
    )


def test_a_command_that_outlives_sigkill_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("_GRACE_S", "_KILLED_S"):
        monkeypatch.setattr(jobs, limit, 0.1)
    with work_folder("made-", tmp_path) as work:
        job = jobs.Job("sleeps", ["sleep", "600"], work)
        with outliving_sigkill(job._process.pid):
            job.stop()
            job.wait()
            assert job.status is None
        assert job._process.wait(60) == -signal.SIGKILL


def test_a_folder_goes_with_its_block(tmp_path: Path) -> None:
    with work_folder("made-", tmp_path) as made:
        assert made.path.is_dir()
    assert not list(tmp_path.iterdir())


def test_a_folder_whose_owner_and_heir_were_killed_goes_when_the_next_is_made(tmp_path: Path) -> None:
    left = tmp_path / "made-left"
    other = tmp_path / "made-by-somebody-else"  # which has no owner of ours
    for folder in (left, other):
        folder.mkdir()
    (left / "owner").touch()
    with work_folder("made-", tmp_path) as mine, work_folder("made-", tmp_path) as second:
        assert sorted(tmp_path.iterdir()) == sorted([other, mine.path, second.path])


def test_what_finds_no_room_in_the_block_is_told_as_that(tmp_path: Path) -> None:
    message = f"no room in TMPDIR, which is {tmp_path}"
    with pytest.raises(NoRoomError, match=message), work_folder("made-", tmp_path):
        raise OSError(errno.ENOSPC, "full")
    with pytest.raises(PermissionError), work_folder("made-", tmp_path):
        raise PermissionError(errno.EACCES, "closed")
