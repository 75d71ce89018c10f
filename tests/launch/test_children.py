"""Children of ranks: forked ones know the rank's place, and none of them is taken for a rank."""

from __future__ import annotations

import pytest
from launching import RANK, Launcher

FORKS = """
import os
import polyhvd.numpy as hvd
hvd.init()
reader, writer = os.pipe()
if os.fork() == 0:
    got = [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.cross_size(), hvd.is_initialized()]
    for function in (hvd.barrier, hvd.init):
        try:
            function()
        except (RuntimeError, ValueError) as error:
            got.append(f"{type(error).__name__}: {error}")
    os.environ["POLYHVD_ALONE"] = "1"
    hvd.init()
    os.write(writer, repr([*got, hvd.rank(), hvd.size()]).encode())
    os._exit(0)
os.wait()
got = eval(os.read(reader, 4096))
child = f"this is a forked child of rank {hvd.rank()} (process {os.getpid()})"
assert got[:5] == [hvd.rank(), 2, hvd.local_rank(), hvd.cross_size(), False], got
assert got[5] == f"NotInitializedError: {child}: only the rank can communicate", got
assert got[6].startswith(f"UnsupportedError: init(): {child}, so it cannot be a rank itself. For"), got
assert got[7:] == [0, 1], got
hvd.barrier()
"""
STARTS = """
import subprocess
import polyhvd.numpy as hvd
hvd.init()
source = "import polyhvd.numpy as hvd; hvd.init(); print(hvd.rank(), hvd.size())"
def child(**variables):
    env = {**os.environ, **variables}
    done = subprocess.run([sys.executable, "-c", source], env=env, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr
status, _, err = child()
assert status == 1, err
assert f"UnsupportedError: init(): this is a child of rank {rank} (process {os.getpid()}), so" in err, err
assert child(POLYHVD_ALONE="1") == (0, "0 1\\n", "")
hvd.barrier()
hvd.shutdown()
assert "POLYHVD_PARENT" not in os.environ
"""


@pytest.mark.parametrize("source", [FORKS, STARTS], ids=["forked", "started"])
def test_a_child_of_a_rank_is_not_taken_for_a_rank(launcher: Launcher, source: str) -> None:
    patient = ["--start-timeout", "600"]  # more than the harness waits
    status, out, err = launcher.run("-np", "2", *patient, source=RANK + source)
    assert status == 0, out + err


def test_the_launcher_does_not_make_its_ranks_alone(launcher: Launcher) -> None:
    source = "import polyhvd.numpy as hvd; hvd.init(); print(hvd.size())"
    status, out, err = launcher.run("-np", "2", "-x", "POLYHVD_ALONE=1", source=source)
    assert (status, sorted(out.splitlines())) == (0, ["[0] 2", "[1] 2"]), err
