"""Allreduce of tensors on GPUs that NCCL does within hosts and MPI between them: on the stand-ins."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import device_arrays
import jobs
import mpirun
import pytest
from mpi_hosts import Hosts, hosts

pytestmark = pytest.mark.slow

__all__ = ["hosts"]

NCCL = device_arrays.STAND_IN.with_name("libnccl.so.2")
SETTINGS = {
    "POLYHVD_NCCL_LIBRARY": str(NCCL),
    "POLYHVD_STAND_IN_CUDA_DEVICES": "4",
    "POLYHVD_HIERARCHICAL_ALLREDUCE": "1",
    "POLYHVD_BACKENDS": "mpi",
}


@pytest.fixture(autouse=True, scope="module")
def stand_ins() -> None:
    if not (device_arrays.STAND_IN.exists() and NCCL.exists()):
        pytest.fail("there are no stand-ins of CUDA and NCCL; make stand-ins builds them", pytrace=False)


BEGIN = (
    jobs.SAY
    + """
import zlib
import numpy as np, polyhvd.numpy as hvd
hvd.init()
# What a launcher of ours says: which GPU is this rank's, and on which host.
os.environ.update(POLYHVD_LOCAL_RANK=str(hvd.local_rank()), POLYHVD_HOST_ID=str(hvd.cross_rank()))
import device_collectives as gpu, nccl_cases as cases, oracle, staged_cases
from device_arrays import DeviceArray
rank, size = hvd.rank(), hvd.size()

def moved_by(function):
    hvd.barrier()
    before = hvd.counters()
    function()
    after = hvd.counters()
    ways = ("nccl", "staged", "mpi", "shm")
    return {name: after[f"{name}_bytes"] - before[f"{name}_bytes"] for name in ways}
"""
)

BY_LEVELS = (
    BEGIN
    + """
oracle.allow_rounding_of_partial_sums()
ones = DeviceArray.from_numpy(np.ones(1000, np.float32))
gpu.allreduce(ones, name="routed", op=hvd.Sum)
routed = moved_by(lambda: gpu.allreduce(ones, name="routed", op=hvd.Sum))
# With what fills a multiple of 128 bytes a rank: a half goes up, to the other host, and comes back.
assert routed == {"nccl": 4000, "staged": 4096, "mpi": 2048, "shm": 0}, routed
cases.allreduce(((17,), (20_011,)), factors=False)
for count in staged_cases.ROUNDS:
    mine = np.arange(count, dtype=np.float32) + rank
    result = gpu.allreduce(DeviceArray.from_numpy(mine), name=f"rounds {count}", op=hvd.Sum)
    assert np.array_equal(result.to_numpy(), size * np.arange(count, dtype=np.float32) + 6)
# Nobody waits on the CPU between operations, whichever way they go: those of CPUs are MPI's among all ranks.
handles = []
for step in range(8):
    for count in (3, 5000, 40_000):
        mine = DeviceArray.from_numpy(np.full(count, rank + step, np.float32))
        handles.append(gpu.allreduce_async(mine, name=f"flight {step} {count}", op=hvd.Sum))
        handles.append(hvd.allreduce_async(mine.to_numpy(), name=f"on CPUs {step} {count}", op=hvd.Sum))
for step in range(8):
    for count in (3, 5000, 40_000):
        for module in (gpu, hvd):
            result = module.synchronize(handles.pop(0))
            result = result if module is hvd else result.to_numpy()
            assert (result == 4 * step + 6).all(), (step, count, module)
first = cases.bits_of_sums()
assert cases.bits_of_sums() == first
say("bits", zlib.crc32(b"".join(first)))
say("worked", rank)
"""
)


def test_values_of_every_type_and_operation_go_by_mpi_between_hosts(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(BY_LEVELS)
    status, out, err = hosts.run(script, **SETTINGS)
    assert (status, sorted(re.findall(r"worked (\d)", out))) == (0, list("0123")), out + err
    assert len(set(re.findall(r"bits (\w+)", out))) == 1, out


REPRODUCIBLE = (
    BEGIN
    + """
terms = [oracle.contribution(np.dtype(np.float32), (300_003,), r) for r in range(size)]
results = []
moved = moved_by(lambda: results.append(hvd.allreduce(terms[rank], name="on CPUs", op=hvd.Sum)))
assert moved["mpi"] > 0 and moved["shm"] == 0, moved
mine = DeviceArray.from_numpy(terms[rank])
moved = moved_by(lambda: results.append(gpu.allreduce(mine, name="on GPUs", op=hvd.Sum).to_numpy()))
assert moved["nccl"] == 0 and moved["staged"] > 0, moved
in_order = ((terms[0] + terms[1]) + terms[2]) + terms[3]
assert all(np.array_equal(result, in_order) for result in results)
say("worked", rank)
"""
)


def test_reproducible_sums_add_the_ranks_in_order_on_gpus_as_well(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(REPRODUCIBLE)
    status, out, err = hosts.run(script, POLYHVD_REPRODUCIBLE="1", **SETTINGS)
    assert (status, sorted(re.findall(r"worked (\d)", out))) == (0, list("0123")), out + err


IN_A_SET = (
    BEGIN
    + """
four = hvd.add_process_set([0, 1, 3, 4])
if four.included():
    mine = DeviceArray.from_numpy(np.full(1000, rank, np.float32))
    gpu.allreduce(mine, name="first", op=hvd.Sum, process_set=four)
    before = hvd.counters()
    result = gpu.allreduce(mine, name="second", op=hvd.Sum, process_set=four)
    assert (result.to_numpy() == 0 + 1 + 3 + 4).all()
    after = hvd.counters()
    moved = {name: after[name] - before[name] for name in ("nccl_bytes", "mpi_bytes")}
    assert moved == {"nccl_bytes": 4000, "mpi_bytes": 2048}, moved
say("set", rank)
import signal, sys, time
tensor = DeviceArray.from_numpy(np.ones(1000, np.float32))
gpu.allreduce_(tensor, name="before", op=hvd.Max)
tensor.to_numpy()
say("between", rank, os.getpid())  # no part of the operation is on its way to another rank then
if rank == 4:
    signal.alarm(60)  # which ends it, too, if the launcher has lost a line
    signal.pause()
begin = time.monotonic()
_, words = cases._ends(lambda: gpu.allreduce_(tensor, name="after", op=hvd.Max))
say("raised", rank, f"{time.monotonic() - begin:.1f}", words)
# A launcher may drop what a rank on another host has said when ranks fail right after.
until = time.monotonic() + 20
while not os.path.exists(sys.argv[1]) and time.monotonic() < until:
    time.sleep(0.02)
os._exit(1)  # MPI waits for the rank that is gone
"""
)


def test_a_process_set_has_levels_and_a_rank_that_is_killed_is_told_of(hosts: Hosts, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(IN_A_SET)
    all_told = tmp_path / "all_told"
    process = hosts.start(script, str(all_told), slots=3, launcher=mpirun.going_on(), **SETTINGS)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        # mpirun itself may stay when ranks end without MPI_Finalize, and the others are not to be ended.
        out = ""
        while len(re.findall("raised ", out)) < 5 and (line := process.stdout.readline()):
            out += line
            if "between" in line and out.count("between") == 6:
                os.kill(int(re.findall(r"between 4 (\d+)", out)[0]), signal.SIGKILL)
    finally:
        all_told.touch()
        process.kill()
        err = process.stderr.read()
        process.wait()
    assert sorted(re.findall(r"set (\d)", out)) == list("012345"), out + err
    if mpirun.going_on():  # else the launcher has ended all
        raised = re.findall(r"raised (\d) ([\d.]+) .*rank 4 \(.*\) was lost", out)
        assert len(raised) == out.count("raised "), out + err
        assert all(float(seconds) < 10 for _, seconds in raised), raised
        # Open MPI 5's launcher at times fails when a rank dies, and MPI then ends ranks before they
        # can say a word: "Socket closed", "MPI_ERRORS_ARE_FATAL".
        if "MPI_ERRORS_ARE_FATAL" not in err:
            assert sorted(rank for rank, _ in raised) == list("01235"), out + err
