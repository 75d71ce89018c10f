"""Jobs one rank of which is slow: all hear which, and a spare takes its place where the user wants that."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from launching import Launcher

pytestmark = pytest.mark.slow

PROGRAM = str(Path(__file__).with_name("slow_job.py"))
#: Ranks that get less of a busy machine's processors than others are slow, too, but not so slow.
FACTOR = ("--slow-rank-factor", "2.5")


class Job:
    """A job of this host."""

    def __init__(self, launcher: Launcher, *options: str, **env: str) -> None:
        self.launcher = launcher
        self.folder = launcher._folder
        launcher.start(*options, argv=[*launcher.python(), PROGRAM, str(self.folder)], env=env)

    def wait_for(self, text: str, count: int = 1) -> None:
        self.launcher.wait_for(text, count)

    def finish(self, size: int) -> tuple[str, str]:
        """Let it end well; what it has printed."""
        (self.folder / "done").touch()
        status, out, err = self.launcher.finish()
        assert (status, len(re.findall(rf"end \d+ size {size}\b", out))) == (0, size), f"{out}\n{err}"
        assert "elastic: " not in err, "nobody has had an error"
        return out, err


def named(err: str) -> list[str]:
    return re.findall(r"polyhvdrun: (rank \d+ on \S+) is slow: its part of each step takes \d+ ms", err)


def test_slow_rank_is_named_on_all_ranks_and_once_by_the_launcher(launcher: Launcher) -> None:
    job = Job(launcher, "-np", "4", "--min-np", "4", *FACTOR, SLOW="3")
    job.wait_for("hears: 3@localhostxTrue at", 4)
    _, err = job.finish(4)
    assert named(err) == ["rank 3 on localhost"], err


def test_rank_0_that_waits_for_its_data_is_found_and_the_stall_report_says_so(launcher: Launcher) -> None:
    env = {"WAITS_FOR_DATA": "1", "POLYHVD_STALL_CHECK_TIME_SECONDS": "1", "STALL_S": "5"}
    job = Job(launcher, "-np", "3", "--min-np", "2", *FACTOR, SLOW="0", **env)
    job.wait_for("hears: 0@localhostxTrue at", 3)
    (job.folder / "stall").touch()
    _, err = job.finish(3)
    assert named(err) == ["rank 0 on localhost"], err
    found = (
        r"rank 0 on localhost is slow: its part of each step takes \d+ ms, of which it waits \d+ ms for data"
    )
    assert len(re.findall(found, err)) == len(re.findall("is slow: ", err)), err
    assert re.search(rf"\n\[0\]   {found}", err), err


def test_nobody_is_named_where_all_are_slow_and_one_pauses_once(launcher: Launcher) -> None:
    job = Job(launcher, "-np", "3", "--min-np", "2", *FACTOR, SLOW="all", SLOW_S="0.05")
    job.wait_for("step 100.", 3)
    out, err = job.finish(3)
    assert "hears" not in out
    assert named(err) == []


def test_spare_takes_the_place_of_a_slow_rank_between_two_steps(launcher: Launcher) -> None:
    options = ("-np", "3", "--min-np", "3", "--spares", "1", "--slow-rank-policy", "evict")
    job = Job(launcher, *options, SLOW="1")
    job.wait_for("world 2 size 3", 3)
    job.wait_for("step 100.", 3)
    out, err = job.finish(3)
    first = dict(re.findall(r"world 1 size 3 rank (\d) process (\d) ", out))
    second = dict(re.findall(r"world 2 size 3 rank (\d) process (\d) ", out))
    assert f"process {first['1']}, which is rank 1, leaves: a spare is faster" in err
    assert (second["0"], second["1"]) == (first["0"], first["2"])
    assert second["2"] not in first.values()
    steps = set(re.findall(r"world 2 size 3 rank \d process \d from (\d+)\.", out))
    assert len(steps) == 1, "no step is lost, nor made twice"
    assert "generation 3" not in err
    assert "was killed" not in err


def test_evict_without_a_spare_is_refused_at_the_start() -> None:
    command = [sys.executable, "-m", "polyhvd.launch", "-np", "2", "--slow-rank-policy", "evict", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "--slow-rank-policy evict needs --spares N" in done.stderr
