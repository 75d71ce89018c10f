"""What follows when a rank ends: each policy's decisions, and jobs that carry them out."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Set
from pathlib import Path

import pytest
from launching import RANK, Launcher, is_running

from polyhvd.launch.cli import main as cli
from polyhvd.launch.cli.options import make_parser, parse
from polyhvd.launch.hosts.lists import Host, place
from polyhvd.launch.job.blame import Ending
from polyhvd.launch.job.job import Job, JobSpec
from polyhvd.launch.job.output import Output
from polyhvd.launch.job.policy import (
    Decision,
    FailurePolicy,
    GoOn,
    LetOthersFinish,
    StartReplacement,
    StopAtFirstFailure,
    StopOthers,
)

RUNNING = frozenset({0, 2})
WELL = Ending(1, "a", 0)
KILLED = Ending(1, "a", -9)
NOT_STARTED = Ending(1, "a", 127, reason="was not started: no")
FAILED = Ending(1, "a", 3)
VICTIM = Ending(1, "a", 1, [b"polyhvd.errors.PeerLostError: rank 2 is gone"])


@pytest.mark.parametrize(
    ("ending", "after_s"), [(KILLED, 0.5), (NOT_STARTED, 0.5), (FAILED, 0.5), (VICTIM, 1.0)]
)
def test_first_failure_stops_the_others_once_its_cause_can_be_known(ending: Ending, after_s: float) -> None:
    usual, busy = StopAtFirstFailure(lambda: 1.0), StopAtFirstFailure(lambda: 3.0)
    assert usual.on_ending(ending, RUNNING, 100.0) == StopOthers(100.0 + after_s)
    assert busy.on_ending(ending, RUNNING, 100.0) == StopOthers(100.0 + 3 * after_s)


def test_end_in_good_order_stops_nobody() -> None:
    assert StopAtFirstFailure().on_ending(WELL, RUNNING, 100.0) == GoOn()


@pytest.mark.parametrize("ending", [WELL, KILLED, NOT_STARTED, FAILED, VICTIM])
def test_others_may_finish(ending: Ending) -> None:
    assert LetOthersFinish().on_ending(ending, RUNNING, 100.0) == GoOn()


def test_first_failure_is_the_default() -> None:
    assert isinstance(JobSpec([], [], []).policy, StopAtFirstFailure)


def test_option_lets_others_finish() -> None:
    programs = parse(make_parser(), ["--keep-going", "true"])
    assert isinstance(cli._spec(programs).policy, LetOthersFinish)


def test_launchers_of_mpi_decide_for_themselves(launcher: Launcher) -> None:
    status, _, err = launcher.run("--mpi", "--keep-going", argv=["true"])
    assert status == 2
    assert err.startswith("polyhvdrun: --keep-going is not for --mpi")


class Noting:
    """Decides as another policy does, and leaves a file for each rank that it was asked about."""

    def __init__(self, inner: FailurePolicy, folder: Path) -> None:
        self._inner, self._folder = inner, folder
        self.asked: list[tuple[int, Set[int]]] = []

    def on_ending(self, ending: Ending, running: Set[int], now: float) -> Decision:
        self.asked.append((ending.rank, running))
        (self._folder / str(ending.rank)).touch()
        return self._inner.on_ending(ending, running, now)


class StopAtOnce:
    """Stops the others without the time that they usually have to report."""

    def on_ending(self, ending: Ending, running: Set[int], now: float) -> Decision:
        return StopOthers(now)


#: Rank 2 is killed, then rank 1 fails, then rank 0 ends well: each once the launcher knows of the one before.
ONE_BY_ONE = RANK + (
    "while rank < 2 and not os.path.exists(f'FOLDER/{rank + 1}'): time.sleep(0.001)\n"
    "if rank == 2: os.kill(os.getpid(), 9)\n"
    "if rank == 1: sys.exit(3)\n"
    "print('finished')\n"
)


def run(policy: Noting, folder: Path) -> tuple[int, Job]:
    hosts = [Host("localhost", 3)]
    argv = [sys.executable, "-c", ONE_BY_ONE.replace("FOLDER", str(folder))]
    output = Output(3)
    with contextlib.closing(output), Job(JobSpec(argv, hosts, place(hosts), policy=policy), output) as job:
        return job.run(), job


def test_others_finish_and_the_status_is_that_of_the_cause(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = Noting(LetOthersFinish(), tmp_path)
    status, job = run(policy, tmp_path)
    assert policy.asked == [(2, {0, 1}), (1, {0}), (0, set())]
    assert job.cause is not None
    assert (status, job.cause.rank) == (137, 2)
    out, err = capfd.readouterr()
    assert out == "[0] finished\n"
    assert err.splitlines() == [
        "polyhvdrun: rank 1 on localhost exited with status 3",
        "polyhvdrun: rank 2 on localhost was killed by SIGKILL",
    ]


def test_policy_is_not_asked_about_ranks_that_it_has_stopped(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    policy = Noting(StopAtOnce(), tmp_path)
    status, _ = run(policy, tmp_path)
    assert (status, [rank for rank, _ in policy.asked]) == (137, [2])
    assert "finished" not in capfd.readouterr().out


class Replacing:
    """Wants what only an elastic job can do."""

    def on_ending(self, ending: Ending, running: Set[int], now: float) -> Decision:
        return StartReplacement()


def test_replacement_that_cannot_be_started_ends_the_job_with_an_error(tmp_path: Path) -> None:
    hosts = [Host("localhost", 2)]
    source = RANK + (
        f"os.symlink(str(os.getpid()), f'{tmp_path}/{{rank}}')\n"  # there with its text at once
        f"while rank == 0 or not os.path.lexists('{tmp_path}/0'): time.sleep(0.001)\n"
        "sys.exit(1)\n"
    )
    output = Output(2)
    spec = JobSpec([sys.executable, "-c", source], hosts, place(hosts), policy=Replacing())
    error = pytest.raises(NotImplementedError, match="rank 1: only an elastic job can replace its ranks")
    with contextlib.closing(output), Job(spec, output) as job, error:
        job.run()
    assert not any(is_running(int(os.readlink(tmp_path / name))) for name in "01")
