"""Processes that get notice to leave an elastic job do so between two steps, and the others continue."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from launching import Launcher, assert_gone, below

from polyhvd.elastic.membership import Limits
from polyhvd.launch.elastic.driven import RESUME_STATUS, Elastic
from polyhvd.launch.elastic.driver import Driver
from polyhvd.launch.hosts.lists import Host
from polyhvd.launch.job.control import Request

PROGRAM = str(Path(__file__).with_name("leaving_job.py"))


class Job:
    """A job of this host."""

    def __init__(self, launcher: Launcher, *options: str, env: dict[str, str] | None = None) -> None:
        self.launcher = launcher
        self.folder = launcher._folder
        launcher.start(*options, argv=[*launcher.python(), PROGRAM, str(self.folder)], env=env)

    def world(self, generation: int, size: int) -> list[int]:
        """Wait for a generation of this size; the pids of its ranks."""
        pattern = rf"world {generation} size {size} from \d+ pids ([0-9 ]+)\."
        while (found := re.search(pattern, self.launcher.out.decode())) is None:
            self.launcher.wait_for("\n", self.launcher.out.count(b"\n") + 1)
        return [int(pid) for pid in found[1].split()]

    def finish(self, size: int) -> tuple[str, str]:
        """Let it end well; what it has printed."""
        (self.folder / "done").touch()
        status, out, err = self.launcher.finish()
        assert (status, out.count("end")) == (0, size), f"{out}\n{err}"
        assert "elastic: " not in err, "nobody has had an error"
        assert "was killed" not in err
        return out, err

    def leave(self, *options: str) -> subprocess.CompletedProcess[str]:
        """Run `polyhvd leave`."""
        assert self.launcher.process is not None
        job = ["--job", str(self.launcher.process.pid)]
        command = [sys.executable, "-m", "polyhvd.cli", "leave", *job, *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)


NOBODY = 65534
QUIET = ("-np", "3", "--min-np", "2", "--log-level", "info")


@pytest.mark.parametrize(("rank", "commit_every"), [(0, 1), (1, 1), (0, 1000000)])
def test_rank_that_gets_sigterm_leaves_between_two_steps(
    launcher: Launcher, rank: int, commit_every: int
) -> None:
    job = Job(launcher, *QUIET, env={"COMMIT_EVERY": str(commit_every)})
    pids = job.world(1, 3)
    os.kill(pids[rank], signal.SIGTERM)
    assert job.world(2, 2) == [pid for pid in pids if pid != pids[rank]]
    assert_gone([pids[rank]])
    out, err = job.finish(2)
    left = re.findall(r"left rank (\d) of 3 everyone False step (\d+)", out)
    assert [item[0] for item in left] == [str(rank)]
    assert re.search(r"world 2 size 2 from (\d+)", out)[1] == left[0][1], "no step is lost, nor made twice"
    assert f"process {rank} (rank {rank}) on localhost leaves with notice" in err
    assert "generation 3" not in err, "its slot stays empty"


def test_rank_whose_function_of_on_leave_fails_with_a_lost_peer_ends(launcher: Launcher) -> None:
    job = Job(launcher, *QUIET, env={"LEAVE_FAILS": "1"})
    pids = job.world(1, 3)
    os.kill(pids[1], signal.SIGTERM)
    job.world(2, 2)
    assert_gone([pids[1]])
    _, err = job.finish(2)
    assert "PeerLostError: of a function of on_leave()" in err


def test_spare_takes_the_place_of_a_rank_that_leaves(launcher: Launcher) -> None:
    job = Job(launcher, "-np", "2", "--min-np", "2", "--spares", "1")
    os.kill(job.world(1, 2)[1], signal.SIGTERM)
    job.world(2, 2)
    job.finish(2)


def test_rank_that_leaves_is_replaced_where_too_few_would_be_left(launcher: Launcher) -> None:
    job = Job(launcher, "-np", "2", "--min-np", "2")
    pids = job.world(1, 2)
    os.kill(pids[1], signal.SIGTERM)
    assert job.world(2, 2)[0] == pids[0]
    job.finish(2)


def test_polyhvd_leave_returns_when_the_rank_has_left(launcher: Launcher) -> None:
    job = Job(launcher, *QUIET)
    pids = job.world(1, 3)
    done = job.leave("--rank", "1")
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"process 1 \(rank 1\) on localhost leaves\nleft after [0-9.]+ s\n", done.stdout), (
        done.stdout
    )
    assert_gone([pids[1]])
    job.world(2, 2)
    wrong = job.leave("--rank", "2")
    assert wrong.returncode == 1
    known = r"hosts: localhost; process 0 \(rank 0\) on localhost, process 2 \(rank 1\) on localhost"
    assert re.fullmatch(rf"polyhvd leave: no such host or process; {known}\n", wrong.stderr), wrong.stderr
    job.finish(2)


def test_refusal_by_a_job_of_many_processes_fits_a_message() -> None:
    hosts = [Host(f"node{number}.a-long-domain.example.org", 8) for number in range(256)]
    driver = Driver(Elastic(Limits(2048, 1, 2048), hosts), hosts)
    ours, theirs = socket.socketpair()
    with ours, theirs, contextlib.closing(driver):
        driver.begin(SimpleNamespace(start_member=lambda *_, **__: None), 0.0)  # type: ignore[arg-type]
        driver.obey(Request({"hosts": ["node256"], "processes": [], "ranks": []}, theirs), 0.0)
        line = ours.makefile().readline()
    error = json.loads(line)["error"]
    assert "hosts: node0.a-long-domain.example.org, node1." in error
    assert "; process 0 (no rank) on node0.a-long-domain.example.org, process 1 " in error
    assert error.endswith(", 2016 more")
    assert len(line) < 1 << 16  # which polyhvd leave takes


def test_polyhvd_leave_without_a_job_or_a_name_says_what_is_missing() -> None:
    command = [sys.executable, "-m", "polyhvd.cli", "leave"]
    done = subprocess.run([*command, "--job", "1", "--rank", "0"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "--job 1: this user has no elastic job with this process id on this host; found: " in done.stderr
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "name what leaves: --host, --rank or --process" in done.stderr


def test_all_ranks_have_time_to_save_when_the_whole_job_is_told_to_end(launcher: Launcher) -> None:
    job = Job(launcher, "-np", "3", "--min-np", "2", "--spares", "1", env={"STEP_S": "0.2"})
    pids = job.world(1, 3)
    launcher.signal(signal.SIGTERM)
    status, out, err = launcher.finish()
    assert status == 128 + signal.SIGTERM
    left = re.findall(r"left rank (\d) of 3 everyone True step (\d+)", out)
    assert sorted(item[0] for item in left) == ["0", "1", "2"], f"{out}\n{err}"
    assert len({item[1] for item in left}) == 1, "all at the same step"
    assert_gone(pids)


@pytest.mark.parametrize("target", ["launcher", "ranks", "agents"])
def test_train_that_all_ranks_leave_goes_on_at_the_same_step_when_it_is_run_again(
    launcher: Launcher, tmp_path: Path, target: str
) -> None:
    folder = tmp_path / "checkpoints"
    source = (
        "import os, sys, time\n"
        "import numpy as np\n"
        "import polyhvd.numpy as hvd\n"
        "from polyhvd.data import ArrayLoader\n"
        "hvd.init()\n"
        "hvd.elastic.on_leave(lambda leave: sys.exit(3))\n"
        "hvd.elastic.on_leave(lambda leave: os.write(1, b'left\\n'))\n"
        "state = hvd.elastic.ArrayState(counts=np.zeros(120), sizes=np.zeros(4))\n"
        "def step(batch):\n"
        "    rows = np.zeros(120)\n"
        "    rows[batch.indices] = 1.0 if batch.weight else 0.0\n"
        "    state.counts += hvd.allreduce(rows, op=hvd.Sum, name='rows')\n"
        "    state.sizes[hvd.size()] += 1\n"
        "    os.write(1, b'step pid %d\\n' % os.getpid())\n"
        "    time.sleep(0.3 if hvd.size() < 3 else 0.0)\n"
        "loader = ArrayLoader([np.arange(120)], batch_size=2)\n"
        f"hvd.elastic.train(step, state, loader, epochs=1, progress=False, checkpoint={str(folder)!r})\n"
        "os.write(1, repr((set(state.counts), state.sizes.tolist())).encode() + b'\\n')\n"
    )
    launcher.start("-np", "2", "--min-np", "1", source=source)
    pids = {int(text) for text in re.findall(rb"pid (\d+)\n", launcher.wait_for("step pid", 6))}
    if target == "launcher":
        launcher.signal(signal.SIGTERM)
    else:
        assert launcher.process is not None
        agents = set(below(launcher.process.pid)) - pids
        for pid in pids if target == "ranks" else agents:
            os.kill(pid, signal.SIGTERM)
    status, out, err = launcher.finish()
    assert status == (128 + signal.SIGTERM if target == "launcher" else RESUME_STATUS), f"{out}\n{err}"
    steps = max(out.count(f"pid {pid}\n") for pid in pids)
    (name,) = [path.name for path in folder.glob("c*")]
    assert name == f"checkpoint-{steps:012d}.npz"
    assert out.count("left\n") == 2, "a function that ends its program does not keep others from theirs"
    launcher.start("-np", "3", "--min-np", "1", source=source)
    status, out, err = launcher.finish()
    assert status == 0, err
    assert out.count("({1.0}, ") == 3, "every row has counted once"


def test_job_whose_ranks_have_all_left_says_resume_me(launcher: Launcher) -> None:
    job = Job(launcher, "-np", "2", "--min-np", "1")
    for pid in job.world(1, 2):
        os.kill(pid, signal.SIGTERM)
    status, out, err = launcher.finish()
    assert status == RESUME_STATUS, err
    assert out.count("left rank") == 2
    assert "everyone True" in out
    assert "every process has left with notice" in err


def test_job_whose_ranks_have_all_left_keeps_no_spare_waiting(launcher: Launcher) -> None:
    job = Job(launcher, "-np", "1", "--min-np", "1", "--spares", "1")
    (pid,) = job.world(1, 1)
    os.kill(pid, signal.SIGTERM)
    status, out, err = launcher.finish()
    assert status == RESUME_STATUS, err
    assert out.count("left rank") == 1


def test_rank_that_comes_to_no_boundary_is_killed_after_the_grace(launcher: Launcher) -> None:
    job = Job(
        launcher,
        "-np",
        "2",
        "--min-np",
        "2",
        "--term-grace-s",
        "1",
        env={"COMMIT_EVERY": "1000000", "NO_CHECKS": "1"},
    )
    pids = job.world(1, 2)
    launcher.signal(signal.SIGTERM)
    assert launcher.finish()[0] == 128 + signal.SIGTERM
    assert_gone(pids)


def test_forked_children_of_a_member_end_by_sigterm_as_ever(launcher: Launcher) -> None:
    source = (
        "import os, signal, time\n"
        "import polyhvd.numpy as hvd\n"
        "hvd.init()\n"
        "pid = os.fork()\n"
        "if pid == 0: time.sleep(60); os._exit(1)\n"
        "os.kill(pid, signal.SIGTERM)\n"
        "print('ended by', os.WTERMSIG(os.waitpid(pid, 0)[1]))\n"
        "signal.signal(signal.SIGTERM, signal.SIG_DFL)\n"
    )
    status, out, err = launcher.run("-np", "1", "--min-np", "1", source=source)
    assert (status, out) == (0, "[0] ended by 15\n"), err


def test_program_with_a_way_of_its_own_with_sigterm_keeps_it(launcher: Launcher) -> None:
    source = (
        "import os, signal, time\n"
        "import polyhvd.numpy as hvd\n"
        "def mine(*_): print('mine', flush=True)\n"
        "signal.signal(signal.SIGTERM, mine)\n"
        "hvd.init()\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "hvd.barrier()\n"
    )
    status, out, err = launcher.run("-np", "2", "--min-np", "1", source=source)
    assert (status, sorted(out.splitlines())) == (0, ["[0] mine", "[1] mine"]), err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_another_user_is_told_that_the_job_is_not_its_own(launcher: Launcher) -> None:
    job = Job(launcher, *QUIET)
    job.world(1, 3)
    assert launcher.process is not None
    # The interpreter may lie where nobody can read: all is imported before the user is another one.
    source = (
        f"import os; from polyhvd.launch.job import control; os.setuid({NOBODY}); "
        f"control.request({launcher.process.pid}, {{'ranks': [1]}}, print)"
    )
    for _ in range(5):  # the refusal may come before or after the words
        refused = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
        assert refused.returncode == 1
        assert "it belongs to another user, or has just ended" in refused.stderr, refused.stderr
    job.finish(3)
