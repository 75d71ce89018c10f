"""Jobs that are killed within an epoch, and go on with another number of ranks from the last position."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from fork_servers import IMPORTS, ForkServers  # tests/harness, on the path by tests/conftest.py
from launching import DEADLINE_S, ROOT

#: Keeps, beside the position, the sum over the rows that were used: what the weights would be.
PROGRAM = """
import json, os, signal, sys
from itertools import chain
from pathlib import Path

import numpy as np
import polyhvd.numpy as hvd
from polyhvd.data import ArrayLoader

path, doomed, at_step = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
hvd.init()
x = np.arange(101, dtype=np.float64) ** 2
loader = ArrayLoader([x], batch_size=3, seed=4)
saved = {"used": [], "sum": 0.0, "data": loader.state_dict()}
if path.exists():
    saved = json.loads(path.read_text())
loader.load_state_dict(saved["data"])
loader.set_epoch(7)
for step, batch in enumerate(loader):
    if step == at_step:
        hvd.barrier()  # rank 0 has written the position of the step before
        if hvd.rank() == doomed:
            os.kill(os.getpid(), signal.SIGKILL)
    mean = hvd.allreduce(batch.weight * batch[0].mean(keepdims=True), name="mean")
    used = hvd.allgather_object(batch.indices.tolist() if batch.weight else [])
    before = loader.cursor
    loader.advance()
    saved["sum"] += float(mean[0]) * (loader.cursor - before)
    saved["used"] += chain(*used)
    saved["data"] = loader.state_dict()
    if hvd.rank() == 0:
        path.with_suffix(".new").write_text(json.dumps(saved))
        path.with_suffix(".new").rename(path)
"""


def run(
    python: Sequence[str], ranks: int, script: Path, *arguments: object
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "polyhvd.launch", "-np", str(ranks), *python, str(script)]
    return subprocess.run(
        [*command, *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=2 * DEADLINE_S
    )


def test_every_row_is_used_once_over_jobs_of_several_sizes(fork_servers: ForkServers, tmp_path: Path) -> None:
    python = fork_servers.python(2, IMPORTS["numpy"])
    script, state = tmp_path / "program.py", tmp_path / "state.json"
    script.write_text(PROGRAM)
    for ranks, doomed, step in ((3, 1, 4), (2, 0, 3), (4, 3, 0)):
        ended = run(python, ranks, script, state, doomed, step)
        assert ended.returncode != 0
        assert "SIGKILL" in ended.stderr or "signal 9" in ended.stderr, ended.stderr
    assert json.loads(state.read_text())["data"]["cursor"] == 3 * 3 * 4 + 2 * 3 * 3
    ended = run(python, 4, script, state, -1, 0)
    assert ended.returncode == 0, ended.stderr
    saved = json.loads(state.read_text())
    assert sorted(saved["used"]) == list(range(101))
    assert abs(saved["sum"] - sum(n**2 for n in range(101))) < 1e-6
