"""Where flight dumps lie, and that nobody else on the machine can get in their way."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from flight_ranks import reduce_until_it_fails
from launching import DEADLINE_S, ROOT, Launcher, wait_until
from pool import Pool

from polyhvd import cli

NOBODY = 65534
IS_ROOT = os.geteuid() == 0
DAY_S = 86400

# Prints what is logged of its dump, as another user where one is given.
DUMP = """
import logging, os, signal, sys, threading
import polyhvd.numpy as hvd

if uid := int(sys.argv[1]):
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
said = threading.Event()

class Lines(logging.Handler):
    def emit(self, record):
        print(record.getMessage(), flush=True)
        said.set()

logging.getLogger("polyhvd").addHandler(Lines())
hvd.init()
os.kill(os.getpid(), signal.SIGUSR2)
print("said" if said.wait(30) else "nothing was said")
hvd.shutdown()
"""


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder such as /tmp: anyone may write there, and remove what is their own."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    for parent in [folder, *folder.parents][1:-2]:  # another user is to get there
        if parent.owner() == folder.owner():
            parent.chmod(parent.stat().st_mode | 0o011)
    return folder


def said_of_a_dump(uid: int = 0, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", DUMP, str(uid)],
        cwd=ROOT,
        env={**os.environ, "POLYHVD_FLIGHT_DIR": "", **env},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("said\n"), done.stdout
    return done.stdout


def dump_of(text: str) -> Path:
    assert "the last operations are in " in text, text
    path = Path(text.split("the last operations are in ")[1].split(";")[0])
    assert path.read_text().startswith('{"flight":')
    return path


def permissions(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("uid", [0, NOBODY])
def test_a_dump_lies_in_a_folder_that_its_user_alone_may_enter(uid: int, shared: Path) -> None:
    if uid and not IS_ROOT:
        pytest.skip("only root can become another user")
    dump = dump_of(said_of_a_dump(uid, TMPDIR=str(shared)))
    owner = uid or os.geteuid()
    assert dump.parent.parent == shared / f"polyhvd-flight-{owner}"
    for path, mode in [(dump.parent.parent, 0o700), (dump.parent, 0o700), (dump, 0o600)]:
        assert permissions(path) == mode, path
        assert path.stat().st_uid == owner


def occupy_with_a_fifo(path: Path, elsewhere: Path) -> None:
    os.mkfifo(path)


def occupy_with_a_link(path: Path, elsewhere: Path) -> None:
    path.symlink_to(elsewhere)


def occupy_as_another_user(path: Path, elsewhere: Path) -> None:
    path.mkdir(mode=0o700)
    os.chown(path, NOBODY, NOBODY)


def occupy_openly(path: Path, elsewhere: Path) -> None:
    path.mkdir()
    path.chmod(0o777)


@pytest.mark.parametrize(
    "occupy", [occupy_with_a_fifo, occupy_with_a_link, occupy_as_another_user, occupy_openly]
)
def test_what_another_user_has_put_in_the_folders_place_is_left_alone(
    occupy: Callable[[Path, Path], None], shared: Path, tmp_path: Path
) -> None:
    if occupy is occupy_as_another_user and not IS_ROOT:
        pytest.skip("only root can give a folder away")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    taken = shared / f"polyhvd-flight-{os.geteuid()}"
    occupy(taken, elsewhere)
    dump = dump_of(said_of_a_dump(TMPDIR=str(shared)))
    assert dump.parent.parent.name.startswith(f"{taken.name}-")
    assert dump.parent.parent.parent == shared
    assert permissions(dump.parent.parent) == 0o700
    assert not list(elsewhere.iterdir())
    assert not taken.is_dir() or not list(taken.iterdir())


def test_in_a_named_folder_that_anyone_may_write_dumps_get_a_private_one(shared: Path) -> None:
    dump = dump_of(said_of_a_dump(POLYHVD_FLIGHT_DIR=str(shared)))
    assert dump.parent.parent == shared / f"polyhvd-flight-{os.geteuid()}"
    assert permissions(dump.parent) == 0o700


def test_in_a_named_folder_of_the_user_dumps_lie_directly(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    dump = dump_of(said_of_a_dump(POLYHVD_FLIGHT_DIR=str(tmp_path)))
    assert dump.parent == tmp_path
    assert permissions(dump) == 0o600


@pytest.mark.parametrize("occupied_by", ["a FIFO", "a link to a FIFO", "a folder"])
def test_a_job_fails_in_time_whatever_lies_under_the_name_of_its_dump(
    occupied_by: str, start: Callable[[int], Pool], tmp_path: Path
) -> None:
    pool = start(2)
    pool.start(reduce_until_it_fails)
    for rank in range(2):
        pool.note(rank)
    name = f"polyhvd-flight.rank0.{pool.pids[0]}.json"
    for taken in (tmp_path / name, tmp_path / f"{name}.new"):
        if occupied_by == "a FIFO":
            os.mkfifo(taken)
        elif occupied_by == "a folder":
            taken.mkdir()
        else:
            os.mkfifo(tmp_path / f"fifo of {taken.name}")
            taken.symlink_to(tmp_path / f"fifo of {taken.name}")
    pool.signal(1, signal.SIGKILL)
    assert pool.answer(0) == "PeerLostError"

    def dumps() -> list[Path]:
        found = tmp_path.glob(f"polyhvd-flight.rank0.{pool.pids[0]}*.json")
        return [path for path in found if stat.S_ISREG(path.lstat().st_mode)]

    wait_until(lambda: len(dumps()) == 1, "the dump under another name")


def test_a_folder_whose_name_is_no_utf8_serves(shared: Path) -> None:
    odd = shared / os.fsdecode(b"f\xfcr uns")
    odd.mkdir(mode=0o1777)
    text = said_of_a_dump(TMPDIR=str(odd))
    assert r"the last operations are in " in text
    assert r"f\xfcr uns" in text, "it is shown escaped"
    (dump,) = odd.glob(f"polyhvd-flight-{os.geteuid()}/*/polyhvd-flight.rank0.*.json")
    assert dump.read_text().startswith('{"flight":')
    command = "import sys; from polyhvd.cli import main; sys.exit(main(['flight', sys.argv[1]]))"
    done = subprocess.run([sys.executable, "-c", command, dump.parent], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert b"rank 0 (pid " in done.stdout


def test_what_is_wrong_with_such_a_folder_is_said(tmp_path: Path) -> None:
    text = said_of_a_dump(POLYHVD_FLIGHT_DIR=str(tmp_path / os.fsdecode(b"n\xfcll")))
    assert r"n\xfcll: No such file or directory" in text


def test_a_full_disk_is_said_and_leaves_nothing_behind(full: Path) -> None:
    text = said_of_a_dump(POLYHVD_FLIGHT_DIR=str(full))
    assert "cannot write the last operations to a file" in text
    assert "No space left on device" in text
    assert "set POLYHVD_FLIGHT_DIR to another folder" in text
    assert [path.name for path in full.iterdir()] == ["filling"]


def test_a_folder_that_does_not_exist_is_said(tmp_path: Path) -> None:
    text = said_of_a_dump(POLYHVD_FLIGHT_DIR=str(tmp_path / "absent"))
    assert "absent: No such file or directory" in text


def old_job(folder: Path, number: int, pid: int, age_s: float) -> Path:
    job = folder / f"job-{number}"
    job.mkdir(mode=0o700)
    (job / f"polyhvd-flight.rank0.{pid}.json").write_text("{}")
    os.utime(job, (time.time() - age_s,) * 2)
    return job


def test_old_dumps_of_jobs_that_have_ended_are_swept(shared: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    user = shared / f"polyhvd-flight-{os.geteuid()}"
    user.mkdir(mode=0o700)
    young = [old_job(user, n, ended.pid, 60 * n) for n in range(40)]
    old = old_job(user, 100, ended.pid, 8 * DAY_S)
    alive = old_job(user, 101, os.getpid(), 9 * DAY_S)
    foreign = old_job(user, 102, ended.pid, 9 * DAY_S)
    (foreign / "of the user").write_text("x")
    os.utime(foreign, (time.time() - 9 * DAY_S,) * 2)
    outside = shared / "outside"
    outside.mkdir()
    (outside / f"polyhvd-flight.rank0.{ended.pid}.json").write_text("{}")
    (user / "job-103").symlink_to(outside)
    dump = dump_of(said_of_a_dump(TMPDIR=str(shared)))
    assert dump.exists()
    assert [job.name for job in young if job.exists()] == [f"job-{n}" for n in range(31)]
    assert not old.exists()
    assert list(alive.iterdir()), "its process is running"
    assert [path.name for path in foreign.iterdir()] == ["of the user"]
    assert list(outside.iterdir()), "a link is not followed"


TWO_RANKS = """
import os, sys
import numpy as np
import polyhvd.numpy as hvd
hvd.init()
hvd.allreduce(np.ones(4), name="first")
if hvd.rank() == 1:
    os._exit(1)
try:
    hvd.allreduce(np.ones(4), name="second")
finally:
    hvd.shutdown()
"""


def test_ranks_of_a_job_write_to_one_folder_which_the_command_reads(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {"POLYHVD_FLIGHT_DIR": "", "TMPDIR": str(shared)}
    status, _, err = Launcher(tmp_path).run("-np", "3", source=TWO_RANKS, env=env)
    assert status != 0
    (job,) = (shared / f"polyhvd-flight-{os.geteuid()}").iterdir()
    assert str(job) in err
    assert cli.main(["flight", str(job)]) == 0
    lines = capsys.readouterr().out
    assert "rank 0 (pid " in lines
    assert "rank 1" in lines
    assert cli.main(["flight", str(shared)]) == 1
    assert "there is no polyhvd-flight" in capsys.readouterr().err
