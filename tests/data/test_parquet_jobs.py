"""Programs and jobs that load Parquet files, and do not come to their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fork_servers import IMPORTS, ForkServers  # tests/harness, on the path by tests/conftest.py
from launching import DEADLINE_S, ROOT

from polyhvd.data import write_parquet
from polyhvd.testing.stand_ins import is_installed

#: Each rank has a folder of its own with the same files, of which one rank's are lost within the epoch.
JOB = """
import sys
from pathlib import Path

import polyhvd.numpy as hvd
from polyhvd.data import ParquetLoader

hvd.init()
folder = Path(sys.argv[1]) / str(hvd.rank())
loader = ParquetLoader(folder, batch_size=2, shuffle=False, streams=hvd.size(), prefetch_bytes=0)
try:
    for step, batch in enumerate(loader):
        if (hvd.rank(), step) == (1, 1):
            (folder / "x.parquet").write_bytes(b"")
        hvd.allreduce(batch["x"].sum(), name="sum")
    print("ended")
except hvd.HorovodInternalError as error:
    print(f"rank {hvd.rank()}: {type(error).__name__}: {error}", flush=True)
    raise
"""


def test_error_of_reading_on_one_rank_is_raised_on_every_rank(
    fork_servers: ForkServers, tmp_path: Path
) -> None:
    for rank in range(3):
        write_parquet({"x": np.arange(180)}, tmp_path / str(rank) / "x.parquet", rows_per_group=10)
    script = tmp_path / "job.py"
    script.write_text(JOB)
    python = fork_servers.python(3, IMPORTS["numpy"])
    command = [sys.executable, "-m", "polyhvd.launch", "-np", "3", *python, str(script), str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * DEADLINE_S)
    said = ended.stdout + ended.stderr
    assert ended.returncode != 0, said
    assert "ended" not in ended.stdout
    for rank in (0, 2):
        (line,) = [line for line in ended.stdout.splitlines() if f"rank {rank}: PeerDepartedError: " in line]
        assert "DataError: " in line
        assert "1/x.parquet has changed since the loader was made" in line


#: The functions of one rank fail in the second epoch, in the thread that reads ahead.
FAILING = """
import sys

import polyhvd.numpy as hvd
from polyhvd.data import ParquetLoader

def transformed(batch):
    if (sys.argv[2], hvd.rank(), loader.epoch) == ("transform", 1, 1):
        raise KeyError("mine")
    return batch

def decoded(data):
    if (sys.argv[2], hvd.rank(), loader.epoch) == ("decode", 1, 1):
        raise KeyError("mine")
    return int(data)

hvd.init()
loader = ParquetLoader(sys.argv[1], batch_size=2, transform=transformed, decode={"x": decoded})
for epoch in range(3):
    loader.set_epoch(epoch)
    for batch in loader:
        try:
            hvd.allreduce(batch["x"].sum(), name="sum")
        except hvd.HorovodInternalError as error:
            print(f"rank {hvd.rank()}: {error}", flush=True)
            raise
print("ended")
"""


@pytest.mark.parametrize(("where", "function"), [("transform", "transformed"), ("decode", "decoded")])
def test_exception_of_a_user_s_function_on_one_rank_ends_all_with_it(
    fork_servers: ForkServers, tmp_path: Path, where: str, function: str
) -> None:
    write_parquet({"x": [str(n).encode() for n in range(60)]}, tmp_path / "x.parquet", rows_per_group=5)
    script = tmp_path / "job.py"
    script.write_text(FAILING)
    python = fork_servers.python(3, IMPORTS["numpy"])
    command = [sys.executable, "-m", "polyhvd.launch", "-np", "3", *python, str(script), str(tmp_path), where]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=2 * DEADLINE_S)
    assert ended.returncode != 0
    assert "ended" not in ended.stdout
    for rank in (0, 2):
        assert (
            f"rank {rank}: allreduce 'sum': rank 1 has failed: KeyError: 'mine' (job.py, line" in ended.stdout
        )
    assert f', in {function}\n[1]     raise KeyError("mine")' in ended.stderr


#: In the second epoch a process is killed while it waits for its data.
KILLED = """
import os, signal, sys

import numpy as np
import polyhvd.numpy as hvd
from polyhvd.data import ParquetLoader

def hanging(batch):
    if os.environ["POLYHVD_MEMBER"] == "1" and loader.epoch == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch

def step(batch):
    rows = np.zeros(60)
    rows[batch.indices] = bool(batch.weight)
    state.counts += hvd.allreduce(rows, op=hvd.Sum, name="rows")

hvd.init()
loader = ParquetLoader(sys.argv[1], batch_size=2, transform=hanging, prefetch_bytes=0)
state = hvd.elastic.ArrayState(counts=np.zeros(60))
hvd.elastic.train(step, state, loader, epochs=3)
print(f"counts {set(state.counts.tolist())} of {hvd.size()}")
"""


def test_job_goes_on_without_a_rank_that_is_killed_while_it_waits_for_data(
    fork_servers: ForkServers, tmp_path: Path
) -> None:
    write_parquet({"x": np.arange(60)}, tmp_path / "x.parquet", rows_per_group=5)
    script = tmp_path / "job.py"
    script.write_text(KILLED)
    python = fork_servers.python(3, IMPORTS["numpy"])
    command = [sys.executable, "-m", "polyhvd.launch", "-np", "3", "--min-np", "2", *python, str(script)]
    ended = subprocess.run(
        [*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=2 * DEADLINE_S
    )
    assert ended.returncode == 0, ended.stderr
    counts = [line.partition("] ")[2] for line in ended.stdout.splitlines()]
    # Another process may have joined in the place of the one that was killed.
    assert counts in (["counts {3.0} of 2"] * 2, ["counts {3.0} of 3"] * 3), ended.stdout


#: A process joins, and makes a loader of a line on which the other one has made one in each world.
AGAIN = """
import os, signal, sys, time

import numpy as np
import polyhvd.numpy as hvd
from polyhvd.data import ArrayLoader

member = int(os.environ["POLYHVD_MEMBER"])

@hvd.elastic.run
def train(state):
    seed = int(sys.argv[1] == "other" and member > 1)
    loader = ArrayLoader([np.arange(24)], batch_size=1, seed=seed)
    for batch in loader:
        hvd.allreduce(np.ones(1), name="step")
        if member == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.2)

hvd.init()
train(hvd.elastic.ArrayState(w=np.zeros(1)))
print("ended")
"""


@pytest.mark.parametrize("seed", ["same", "other"])
def test_loader_that_is_made_again_in_each_world_is_compared_with_that_of_a_new_process(
    fork_servers: ForkServers, tmp_path: Path, seed: str
) -> None:
    script = tmp_path / "job.py"
    script.write_text(AGAIN)
    python = fork_servers.python(2, IMPORTS["numpy"])
    command = [sys.executable, "-m", "polyhvd.launch", "-np", "2", "--min-np", "2", *python, str(script)]
    ended = subprocess.run(
        [*command, seed],
        cwd=ROOT,
        env={**os.environ, "POLYHVD_STALL_CHECK_TIME_SECONDS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
    )
    assert (ended.returncode == 0) == (seed == "same"), ended.stderr
    assert ended.stdout.count("ended") == (2 if seed == "same" else 0)
    assert ("argument 'seed': 0 on rank 0; 1 on rank 1" in ended.stderr) == (seed == "other"), ended.stderr
    assert "other ranks have not begun" not in ended.stderr


INTERRUPTED = """
import os, signal, sys, threading
from polyhvd.data import ParquetLoader
from polyhvd.data.files import ParquetFiles

read = ParquetFiles.read

def interrupt(self, group):
    if sys.argv[2] == "reading" and group.number == 0:
        os.kill(os.getpid(), signal.SIGINT)
    return read(self, group)

ParquetFiles.read = interrupt
for batch in ParquetLoader(sys.argv[1], batch_size=2, prefetch_bytes=0, placement=lambda: (0, 1)):
    if sys.argv[2] == "training":
        os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("when", ["reading", "training"])
def test_interrupt_ends_the_program(tmp_path: Path, when: str) -> None:
    write_parquet({"x": np.arange(200)}, tmp_path / "x.parquet", rows_per_group=10)
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path), when]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == -signal.SIGINT, ended.stderr
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert "Fatal" not in ended.stderr


#: A thread of TensorFlow's reads on, by prefetch(), when the program ends.
DATASET = """
import os, signal, sys
import tensorflow as tf
from polyhvd.data import ParquetLoader
from polyhvd.tensorflow.data import Batches

reading, interrupted = 0, False

def interrupt(batch):  # several times: Python ignores an interrupt that arrives in a __del__ method
    global reading
    reading += 1
    if sys.argv[2] == "interrupt" and reading % 20 == 0 and not interrupted:
        os.kill(os.getpid(), signal.SIGINT)
    return batch

place = lambda: (0, 1)
loader = ParquetLoader(sys.argv[1], batch_size=2, prefetch_bytes=0, transform=interrupt, placement=place)
data = Batches(loader, x="x", y="x").dataset().prefetch(4)
iterator = iter(data)
try:
    for _ in range(3 if sys.argv[2] == "end" else 80):
        next(iterator)
except KeyboardInterrupt:
    interrupted = True
    raise
"""


@pytest.mark.skipif(not is_installed("tensorflow"), reason="TensorFlow is not installed")
@pytest.mark.parametrize(("how", "code"), [("end", 0), ("interrupt", -signal.SIGINT)])
def test_program_ends_while_a_dataset_is_being_read(
    fork_servers: ForkServers, tmp_path: Path, how: str, code: int
) -> None:
    write_parquet({"x": np.arange(200)}, tmp_path / "x.parquet", rows_per_group=10)
    script = tmp_path / "program.py"
    script.write_text(DATASET)
    command = [*fork_servers.python(1, IMPORTS["tensorflow"]), str(script), str(tmp_path), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr.splitlines()[-1:] == ([] if code == 0 else ["KeyboardInterrupt"])


#: Rank 0 reads all the time that the others wait for it, with a loader that they never read.
VALIDATING = """
import sys, time
from pathlib import Path

import polyhvd.numpy as hvd
import pyarrow.dataset, pyarrow.parquet
from polyhvd.data import ParquetLoader

hvd.init()
for epoch in range(2):
    if hvd.rank() == 0:
        loader = ParquetLoader(sys.argv[1], batch_size=2)
        for batch in loader:
            time.sleep(0.3)
    hvd.barrier()
    time.sleep(4)
if hvd.rank() == 0:
    hvd.shutdown() if sys.argv[2] == "first" else time.sleep(1)
print("ended")
"""


@pytest.mark.parametrize("order", ["first", "last"])
def test_rank_that_validates_without_the_others_is_no_stall(
    fork_servers: ForkServers, tmp_path: Path, order: str
) -> None:
    write_parquet({"x": np.arange(30)}, tmp_path / "x.parquet", rows_per_group=5)
    script = tmp_path / "job.py"
    script.write_text(VALIDATING)
    python = fork_servers.python(3, IMPORTS["numpy"])
    command = [sys.executable, "-m", "polyhvd.launch", "-np", "3", *python, str(script), str(tmp_path), order]
    environment = {
        **os.environ,
        "POLYHVD_STALL_CHECK_TIME_SECONDS": "1",
        # Longer than the others wait for rank 0 on a busy machine, and shorter than its loader's operation.
        "POLYHVD_STALL_SHUTDOWN_TIME_SECONDS": "8",
    }
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2 * DEADLINE_S
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ended") == 3
    assert "polyhvd.data/" not in ended.stderr  # rank 0 does not wait for it, nor does any other rank
    assert "polyhvd-metrics" not in ended.stderr
    warnings = [line for line in ended.stderr.splitlines() if "other ranks have not begun" in line]
    assert len(warnings) == 2  # of each loader
    assert all("ParquetLoader(job.py:12): rank 0 of 3 began to load " in line for line in warnings)


LEAVING = """
import time

import numpy as np
import polyhvd.numpy as hvd
from polyhvd.data import ArrayLoader

hvd.init()
if hvd.rank() == 1:
    list(ArrayLoader({"x": np.arange(12)}, batch_size=2))  # the other rank never compares it
    time.sleep(1)
print("ended")
"""


def test_rank_that_leaves_without_a_loader_of_another_is_no_failure(
    fork_servers: ForkServers, tmp_path: Path
) -> None:
    script = tmp_path / "job.py"
    script.write_text(LEAVING)
    python = fork_servers.python(2, IMPORTS["numpy"])
    ended = subprocess.run(
        [sys.executable, "-m", "polyhvd.launch", "-np", "2", *python, str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("ended") == 2
    assert ended.stderr == ""
