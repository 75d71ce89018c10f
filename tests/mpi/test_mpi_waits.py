"""Every wait for MPI ends: with an error when a rank dies or does not come, and with Ctrl-C."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import mpirun
import pytest

from polyhvd.config import Settings
from polyhvd.errors import PeerLostError
from polyhvd.runtime import mpi

Write = Callable[[str], Path]

SAY = (
    jobs.SAY
    + """
import signal, sys, threading, time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
"""
)

#: What a rank does instead of making a communicator.
STAND_IN = """
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
int MPI_Comm_create_group(void) {
  kill(getpid(), atoi(getenv("TEST_SIGNAL")));
  for (;;) pause();
}
__attribute__((destructor)) static void end(void) {
  while (getenv("TEST_WAITS_AT_END")) pause();
}
"""

MAKES_A_PROCESS_SET = (
    SAY
    + """
if rank == 1:
    os.environ["POLYHVD_MPI_LIBRARY"] = sys.argv[1]
import numpy as np, polyhvd.numpy as hvd
hvd.init()
pair = hvd.add_process_set([0, 1])
begin = time.monotonic()
try:
    if pair.included():
        hvd.allreduce(np.ones(3), process_set=pair)
    hvd.barrier()
except hvd.HorovodInternalError as error:
    say("raised", rank, f"{time.monotonic() - begin:.1f}", error)
    raise
"""
)


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MPI's library, but for the making of communicators."""
    tmp_path = tmp_path_factory.mktemp("stand_in")
    asks = tmp_path / "asks.py"
    asks.write_text(
        "from polyhvd.config import Settings\n"
        "from polyhvd.runtime import mpi\n"
        "print(mpi.probe(Settings()).path)\n"
    )
    _, out, err = jobs.run(asks, 1)
    library = Path(out.strip())
    assert library.is_absolute(), out + err
    source, made = tmp_path / "stand_in.c", tmp_path / "libstand_in.so"
    source.write_text(STAND_IN)
    linked = ["-Wl,--no-as-needed", str(library), f"-Wl,-rpath,{library.parent}"]
    subprocess.run(["cc", "-shared", "-fPIC", "-o", made, source, *linked], check=True)
    return made


@pytest.mark.parametrize("one_thread", ["0", "1"])
def test_a_rank_that_is_stopped_is_not_waited_for_longer_than_the_deadline(
    write: Write, stand_in: Path, one_thread: str
) -> None:
    status, out, err = jobs.run(
        write(MAKES_A_PROCESS_SET),
        3,
        arguments=(str(stand_in),),
        TEST_SIGNAL="19",
        POLYHVD_BACKENDS="mpi",
        POLYHVD_DATA_TIMEOUT_SECONDS="2",
        POLYHVD_MPI_THREADS_DISABLE=one_thread,
    )
    assert status != 0
    raised = re.search(r"raised 0 ([\d.]+) .*MPI_Comm_create_group did not return in time", out)
    assert raised, out + err
    assert 1.5 < float(raised[1]) < 60  # and not the 300 s that are the default


def test_a_rank_that_is_killed_while_a_process_set_is_made_is_told_of(write: Write, stand_in: Path) -> None:
    _, out, err = jobs.run(
        write(MAKES_A_PROCESS_SET),
        3,
        launcher=mpirun.going_on(),
        arguments=(str(stand_in),),
        TEST_SIGNAL="9",
        POLYHVD_BACKENDS="mpi",
    )
    if mpirun.going_on():  # else the launcher has ended all
        raised = re.search(r"raised 0 ([\d.]+) .*rank 1 \(.*\) was lost to rank \d", out)
        assert raised, out + err
        assert float(raised[1]) < 60


GIVES_UP = (
    SAY
    + """
from polyhvd.config import Settings
from polyhvd.runtime import mpi
if rank == 0:
    os.environ["POLYHVD_MPI_LIBRARY"] = sys.argv[1]
settings = Settings.from_environment()
mpi._runtime = mpi.open_library(settings)
mpi.start(mpi._runtime, settings)
if rank == 1:
    time.sleep(600)  # in MPI, but never in init()
os.environ["POLYHVD_START_TIMEOUT"] = "0.5"
import polyhvd as hvd
hvd.init()
"""
)


def test_a_rank_that_has_given_up_ends_though_the_end_of_mpi_s_library_waits(
    write: Write, stand_in: Path
) -> None:
    status, _, err = jobs.run(write(GIVES_UP), 2, arguments=(str(stand_in),), TEST_WAITS_AT_END="1")
    assert status != 0
    assert "PeerLostError: rank 0 waited " in err


COMES_LATE = (
    SAY
    + """
late = sys.argv[1] + "/may_come"
if rank == 1:
    while not os.path.exists(late):
        time.sleep(0.05)
import numpy as np, polyhvd.numpy as hvd
if rank == 0:
    os.environ["POLYHVD_START_TIMEOUT"] = "1"
    try:
        hvd.init()
    except hvd.HorovodInternalError as error:
        say("raised", error)
    os.environ["POLYHVD_START_TIMEOUT"] = "30"
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        hvd.init()
    except KeyboardInterrupt:
        say("interrupted")
    open(late, "w").close()
hvd.init()
assert (hvd.allreduce(np.ones(3), op=hvd.Sum) == 2).all()
say("worked", rank)
"""
)


def test_a_wait_for_the_start_of_mpi_ends_and_may_be_gone_on_with(write: Write, tmp_path: Path) -> None:
    status, out, err = jobs.run(write(COMES_LATE), 2, arguments=(str(tmp_path),), POLYHVD_BACKENDS="mpi")
    assert status == 0, out + err
    assert re.search(r"raised MPI_Init_thread of .* has not returned after 1 s in process \d+", out), (
        out + err
    )
    for said in (
        "all 2 processes of this launch",
        "POLYHVD_START_TIMEOUT",
        "interrupted",
        "worked 0",
        "worked 1",
    ):
        assert said in out, out + err


NEVER_COMES = (
    SAY
    + """
if rank == 1:
    time.sleep(600)
import polyhvd as hvd
hvd.init()
"""
)


def test_a_job_whose_rank_never_starts_mpi_ends(write: Write) -> None:
    status, out, err = jobs.run(write(NEVER_COMES), 2, POLYHVD_START_TIMEOUT="1")
    # 1 is rank 0's; of rank 1, which it kills, MPICH's launcher tells the 9, now and then, instead.
    assert status in (1, 9), out + err
    assert "PeerLostError: MPI_Init_thread" in err, out + err


LEAVES_EARLY = (
    SAY
    + """
import atexit, subprocess
import polyhvd as hvd
hvd.init()
hvd.shutdown()
if rank == 1:  # a launcher need not end it when rank 0 has left, with status 0, and not finalised
    time.sleep(20)
    os._exit(1)
# Comes right before MPI is finalised. Not a thread: those have ended by then.
atexit.register(subprocess.Popen, ["sh", "-c", f"sleep 1; kill -INT {os.getpid()}"])
say("leaves")
"""
)


def test_ctrl_c_ends_the_wait_for_others_at_the_end(write: Write) -> None:
    _, out, err = jobs.run(write(LEAVES_EARLY), 2)
    assert "leaves" in out, out + err
    assert re.search(r"_runtime.finish\(\)[^:]*KeyboardInterrupt", err), out + err


class _Slow:
    """A runtime whose MPI begins at the third time of asking."""

    version = "Open MPI v4.1.4, package: none"

    def __init__(self) -> None:
        self.asked: list[float] = []

    def initialize(self, timeout_s: float) -> bool:
        self.asked.append(timeout_s)
        return len(self.asked) > 2


def test_a_long_wait_for_the_start_of_mpi_is_told_of_while_it_lasts(caplog: pytest.LogCaptureFixture) -> None:
    runtime: Any = _Slow()
    settings = replace(Settings(), start_timeout_s=45.0)
    with pytest.raises(PeerLostError, match=r"of Open MPI v4.1.4 has not returned after 45 s"):
        mpi.start(runtime, settings)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "has not returned after 10 s" in caplog.text
    assert "look for one that has not come" in caplog.text
    mpi.start(runtime, settings)
    assert runtime.asked == [10.0, 35.0, 10.0]
