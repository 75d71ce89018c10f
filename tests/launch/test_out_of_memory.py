"""The report on a rank that the kernel has killed for lack of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import RANK, Launcher, wait_until

from polyhvd.launch.job import processes

LIMIT_BYTES = 192 << 20
#: By the version of cgroups: the folder of the memory controller, and the file for a limit.
CONTROLLERS = {"/sys/fs/cgroup": "memory.max", "/sys/fs/cgroup/memory": "memory.limit_in_bytes"}
GREEDY = RANK + (
    "held = []\n"
    "while rank == 1: held.append(bytearray(os.urandom(1 << 20) * 8))\n"
    "while True: time.sleep(60)\n"
)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup with little memory."""
    for folder, limit in CONTROLLERS.items():
        if not (Path(folder) / "cgroup.procs").exists() or not os.access(folder, os.W_OK):
            continue
        made = Path(folder) / f"polyhvd-test-{os.getpid()}"
        made.mkdir()
        try:
            if (made / limit).exists():  # the controller may be off below this folder
                (made / limit).write_text(str(LIMIT_BYTES))
                yield made
                wait_until(
                    lambda processes=made / "cgroup.procs": not processes.read_text(), "an empty cgroup"
                )
                return
        finally:
            made.rmdir()
    pytest.skip("no cgroup with a limit of memory can be made here")


def test_a_rank_that_the_kernel_kills_for_lack_of_memory_is_reported_with_the_counts(
    launcher: Launcher, cgroup: Path
) -> None:
    inside = ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs && exec "$@"', "sh"]
    status, _, err = launcher.start("-np", "2", source=GREEDY, before=inside, fresh=True).finish()
    assert status == 137, err
    last = err.splitlines()[-1]
    assert last.startswith("polyhvdrun: rank 1 on localhost was killed by SIGKILL (out of memory? "), err
    assert ": 1 in the cgroup (container) of this rank, " in last
    assert int(last.split(", ")[-1].split()[0]) >= 1


def test_counts_are_read_from_cgroups_of_both_versions_and_from_the_host(
    tmp_path: Path,
) -> None:
    for text, name in (
        ("low 0\nhigh 0\nmax 41\noom 4\noom_kill 3\noom_group_kill 0\n", "memory.events"),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", "memory.oom_control"),
    ):
        (tmp_path / name).write_text(text)
        assert processes._oom_kill(str(tmp_path / name)) == 3
    assert processes._oom_kill(str(tmp_path / "absent")) is None
    assert processes._oom_kill("/proc/vmstat") == processes.oom_kills()[1]
