"""Jobs as users start them under MPI: with mpirun, with mpi4py's runner, with polyhvdrun, and with faults."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jobs
import launching
import mpirun
import pytest

import polyhvd

Write = Callable[[str], Path]

needs_mpi4py = pytest.mark.skipif(
    importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed"
)

WORKS = (
    jobs.SAY
    + """
import numpy as np, polyhvd.numpy as hvd
hvd.init()
rank, size = hvd.rank(), hvd.size()
total = hvd.allreduce(np.full(5, rank + 1.0), op=hvd.Sum)
assert (total == size * (size + 1) / 2).all(), total
assert (hvd.local_rank(), hvd.local_size(), hvd.cross_size()) == (rank, size, 1)
assert hvd.mpi_enabled() and hvd.mpi_built() and not hvd.gloo_enabled()
assert hvd.mpi_threads_supported() in (True, False)
moved = hvd.counters()
say("worked", rank, moved["mpi_bytes"] > 0, moved["shm_bytes"] > 0)
"""
)


def worked(out: str) -> list[tuple[str, ...]]:
    """Rank, whether MPI has moved bytes, and whether shared memory has, of each rank that says so."""
    return sorted(re.findall(r"worked (\d) (\w+) (\w+)", out))


def test_ranks_started_by_mpirun_find_each_other_and_share_memory(write: Write) -> None:
    status, out, err = jobs.run(write(WORKS), 3)
    assert status == 0, err
    assert worked(out) == [(str(rank), "False", "True") for rank in range(3)], out + err


@needs_mpi4py
def test_mpi4py_may_come_after_us_and_is_the_same_mpi(write: Write) -> None:
    source = WORKS + (
        "from mpi4py import MPI\n"
        "assert MPI.COMM_WORLD.rank == rank and MPI.COMM_WORLD.allreduce(1) == size\n"
        "hvd.shutdown()\n"
        "assert MPI.COMM_WORLD.allreduce(1) == size and not MPI.Is_finalized()\n"
        "hvd.init()\n"
        "assert (hvd.rank(), hvd.size()) == (rank, size)\n"
    )
    status, out, err = jobs.run(write(source), 2, HOROVOD_CPU_OPERATIONS="MPI")
    assert status == 0, err
    assert worked(out) == [(str(rank), "True", "False") for rank in range(2)], out + err


COMMUNICATORS = (
    jobs.SAY
    + """
from mpi4py import MPI
import numpy as np, pytest, polyhvd.numpy as hvd
world = MPI.COMM_WORLD

def total(process_set=hvd.global_process_set):
    return hvd.allreduce(np.array([10.0**world.rank]), op=hvd.Sum, process_set=process_set)[0]

# Each half is a world of its own, with its ranks in the order of the keys.
half = world.Split(world.rank % 2, key=-world.rank)
hvd.init(comm=half)
assert (hvd.rank(), hvd.size()) == (half.rank, half.size)
assert hvd.global_process_set.mpi_comm is half
assert total() == {0: 101, 1: 10}[world.rank % 2]
hvd.shutdown()

# Every rank knows the communicator that it is in; there are two process sets.
mine = hvd.ProcessSet(world.Split(world.rank % 2))
first = hvd.ProcessSet(world.Split(0 if world.rank < 2 else MPI.UNDEFINED))
hvd.init(comm=world, process_sets=[mine, first])
assert mine.ranks == list(range(world.rank % 2, 3, 2)) and first.ranks == [0, 1], (mine, first)
assert total(mine) == {0: 101, 1: 10}[world.rank % 2]
assert first.included() == (world.rank < 2)
if first.included():
    assert total(first) == 11
last = hvd.add_process_set(world.Get_group().Incl([2, 1]))
assert last.ranks == [1, 2]
if last.included():
    assert total(last) == 110
hvd.barrier()
hvd.shutdown()
assert hvd.global_process_set.mpi_comm is None

# Some ranks of the world, in an order of their own.
if world.rank != 1:
    hvd.init(comm=[2, 0])
    assert (hvd.rank(), hvd.size(), total()) == ([2, 0].index(world.rank), 2, 101)
    hvd.shutdown()
else:
    with pytest.raises(ValueError, match="this is rank 1 of 3"):
        hvd.init(comm=[2, 0])
with pytest.raises(ValueError, match="COMM_NULL"):
    hvd.init(comm=MPI.COMM_NULL)
with pytest.raises(ValueError, match="expected a communicator"):
    hvd.init(comm="world")

# What MPI refuses is an exception with its words.
from polyhvd.runtime import mpi
with pytest.raises(RuntimeError, match="MPI_Comm_test_inter of .* failed: .*communicator"):
    mpi.runtime().meet(MPI._handleof(MPI.COMM_NULL), [], 5.0)
say("worked", world.rank, True, True)
"""
)


@needs_mpi4py
@pytest.mark.parametrize("backends", ["host", "mpi"])
def test_communicators_of_mpi4py_make_worlds_and_process_sets(write: Write, backends: str) -> None:
    status, out, err = jobs.run(write(COMMUNICATORS), 3, python=("-m", "mpi4py"), POLYHVD_BACKENDS=backends)
    assert status == 0, err
    assert len(worked(out)) == 3, out + err


def test_polyhvdrun_starts_jobs_through_mpirun(write: Write) -> None:
    command = [sys.executable, "-m", "polyhvd.launch", "--mpi", "-np", "2", "--cycle-time-ms", "2.5"]
    source = "import os\nassert os.environ['POLYHVD_CYCLE_TIME'] == '2.5'\n" + WORKS
    done = subprocess.run(
        [*command, sys.executable, str(write(source))],
        env=jobs.environment(POLYHVD_BACKENDS="mpi"),
        cwd=jobs.ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert worked(done.stdout) == [("0", "True", "False"), ("1", "True", "False")], done.stdout


DISAGREEING = (
    jobs.SAY
    + """rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
os.environ["POLYHVD_BACKENDS"] = ["mpi", "host"][rank]
import polyhvd as hvd
try:
    hvd.init()
except hvd.HorovodInternalError as error:
    say(f"refused {rank}: {error}")
"""
)


def test_ranks_with_other_backends_are_told_of_each_other(write: Write) -> None:
    _, out, err = jobs.run(write(DISAGREEING), 2)
    for rank in range(2):
        assert f"refused {rank}: init(): backends must be the same on all ranks" in out, out + err
    assert "ranks [0] have ['nccl?', 'mpi', 'host']; ranks [1] have ['host']" in out, out


LATE = (
    jobs.SAY
    + """
import time
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
import polyhvd as hvd
from polyhvd.runtime import mpi
from polyhvd.config import Settings
mpi._runtime = mpi.open_library(Settings.from_environment())
mpi.start(mpi._runtime, Settings.from_environment())
if rank == 1:
    time.sleep(600)  # in MPI, but never in init()
os.environ["POLYHVD_START_TIMEOUT"] = "2"
try:
    hvd.init()
except hvd.HorovodInternalError as error:
    say(error)
    raise
"""
)


def test_a_rank_that_does_not_come_is_waited_for_in_vain(write: Write) -> None:
    status, out, err = jobs.run(write(LATE), 2)
    assert status != 0
    assert "rank 0 waited 2 s for all 2 ranks of the communicator to call init()" in out, out + err


BUSY = (
    jobs.SAY
    + """
import numpy as np, polyhvd.numpy as hvd
hvd.init()
while True:
    hvd.allreduce(np.ones(1 << 18), name="x")
    say("pid", os.getpid())
"""
)


def test_nothing_is_left_of_a_job_whose_rank_was_killed(write: Write) -> None:
    process = jobs.start(write(BUSY), 2, POLYHVD_BACKENDS="mpi")
    assert process.stdout is not None
    try:
        pids: set[int] = set()
        while len(pids) < 2:
            line = process.stdout.readline()
            assert line, "the job ended early"
            pids.update(launching.pids(line.encode()))
        os.kill(min(pids), signal.SIGKILL)
        process.communicate(timeout=30)
        assert process.returncode != 0
        launching.assert_gone(sorted(pids))
    finally:
        process.kill()
        process.wait()


AGAIN = (
    jobs.SAY
    + """
import numpy as np, polyhvd.numpy as hvd
for turn in range(40):
    hvd.init()
    assert (hvd.allreduce(np.ones(3), op=hvd.Sum) == hvd.size()).all()
    hvd.shutdown()
    open_now = len(os.listdir("/proc/self/fd"))
    settled = open_now if turn == 3 else settled if turn > 3 else 0
assert open_now <= settled, (settled, open_now)
hvd.init()
if hvd.rank() == 1:
    raise SystemExit("rank 1 has seen enough")
try:
    while True:
        hvd.allreduce(np.ones(3))
except hvd.HorovodInternalError as error:
    say("raised", error)
"""
)


def test_init_may_follow_shutdown_and_a_rank_that_leaves_early_is_told_of(write: Write) -> None:
    status, out, err = jobs.run(write(AGAIN), 2, POLYHVD_BACKENDS="mpi")
    assert "rank 1 has ended with: rank 1 has seen enough" in out, out + err
    assert "rank 1 has seen enough" in err
    assert status != 0


THREADS = (
    jobs.SAY
    + """
import sys
import mpi4py
mpi4py.rc.thread_level = sys.argv[1]
from mpi4py import MPI
import numpy as np, polyhvd.numpy as hvd
try:
    hvd.init()
    assert (hvd.allreduce(np.ones(3), op=hvd.Sum) == 2).all()
    say("worked", hvd.rank(), hvd.mpi_threads_supported(), True)
except ValueError as error:
    say("refused", error)
"""
)


@needs_mpi4py
def test_less_than_a_serialised_mpi_is_refused(write: Write) -> None:
    script = write(THREADS)
    _, out, err = jobs.run(script, 2, arguments=("funneled",), POLYHVD_BACKENDS="mpi")
    assert out.count("was initialized by other code with MPI_THREAD_FUNNELED") == 2, out + err
    _, out, err = jobs.run(script, 2, arguments=("serialized",), POLYHVD_BACKENDS="mpi")
    assert worked(out) == [("0", "False", "True"), ("1", "False", "True")], out + err


def test_run_with_use_mpi_returns_the_results_in_rank_order_and_raises_what_a_rank_has_raised() -> None:
    def train(fails: bool) -> tuple[int, bool, str]:
        import os

        import numpy
        import polyhvd.numpy as hvd

        hvd.init()
        if fails and hvd.rank() == 1:
            raise ArithmeticError("one rank has no number")
        total = hvd.allreduce(numpy.array([hvd.rank()]), op=hvd.Sum)
        return int(total[0]) + hvd.rank(), hvd.mpi_enabled(), os.environ["OF_THE_JOB"]

    arguments = {"np": 2, "use_mpi": True, "env": {**dict(mpirun.AS_ROOT), "OF_THE_JOB": "x"}}
    assert polyhvd.run(train, (False,), **arguments) == [(1, True, "x"), (2, True, "x")]
    with pytest.raises(ArithmeticError, match="one rank has no number"):
        polyhvd.run(train, (True,), **arguments)
