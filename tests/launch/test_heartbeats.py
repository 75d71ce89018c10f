"""Launcher and agents that do not hear each other: nobody is left alone, and nobody is given up too early."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import netns
import pytest
import sshd
from launching import DEADLINE_S, RANK, WAITING, Launcher, assert_gone, below, pids, wait_until

from polyhvd.launch.job import agent
from polyhvd.launch.job.agent import Heartbeat

#: Short, and long enough for a machine whose cores other tests use.
SHORT = ["--heartbeat-timeout-s", "3"]
#: Saves a checkpoint when it gets a signal, and prints its place.
SAVING = RANK + (
    "def save(*_):\n"
    "  open({folder!r} + f'/saved{{rank}}', 'w').close()\n"
    "  os._exit(0)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "os.write(1, b'pid %d\\n' % os.getpid())\n"
    "while True: time.sleep({pause}); {work}\n"
)


def saving(folder: Path, work: str = "pass", pause: float = 0.05) -> str:
    return SAVING.format(folder=str(folder), work=work, pause=pause)


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("saved*"))


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def agent_and_guard(launcher: Launcher) -> tuple[int, int]:
    """Of the one local agent."""
    assert launcher.process is not None
    guard, agent = (pid for pid in below(launcher.process.pid) if b"polyhvd-program" in command_of(pid))
    return agent, guard


def test_heartbeat_is_silent_after_its_time_and_due_often_before() -> None:
    heartbeat = Heartbeat(6.0, 100.0)
    assert not heartbeat.is_due(100.5)
    assert heartbeat.is_due(101.0)
    assert heartbeat.timer_s(101.0) == 1.0
    heartbeat.received(101.0)
    assert not any(heartbeat.is_silent(now) for now in (102.0, 103.0, 104.0, 105.0, 106.0, 106.9))
    assert heartbeat.is_silent(107.0)


def test_whoever_was_away_waits_anew() -> None:
    heartbeat = Heartbeat(6.0, 100.0)
    assert not heartbeat.is_silent(200.0)
    assert not any(heartbeat.is_silent(200.0 + second) for second in range(1, 6))
    assert heartbeat.is_silent(206.0)


@pytest.mark.parametrize("timeout_s", [0.0, 1e5])
def test_agents_without_a_job_receive_heartbeats_whatever_the_limit_of_the_job_is(timeout_s: float) -> None:
    launcher, waiting = Heartbeat(timeout_s, 100.0), Heartbeat(agent._JOB_TIMEOUT_S, 100.0)
    for now in range(100, 1000, 10):
        if launcher.is_due(float(now)):
            waiting.received(float(now))
        assert not launcher.is_silent(float(now))
        assert not waiting.is_silent(float(now))


@pytest.mark.skipif(not netns.available() or not sshd.available(), reason="needs root, iproute2 and sshd")
@pytest.mark.parametrize("how", ["cable", "ssh"])
def test_a_cut_host_ends_its_ranks_gently_and_the_launcher_reports_it(
    launcher: Launcher, tmp_path: Path, how: str
) -> None:
    with (
        netns.two_hosts() as (here, there),
        sshd.sshd(
            tmp_path,
            there.address,
            port=2222,
            within=there.command(),
            answers=lambda *_: ":2222 " in there.run("ss", "-Hltn", capture_output=True).stdout,
        ) as ssh,
    ):
        hosts = ["-H", f"localhost:1,{there.address}:1", *ssh, *SHORT]
        launcher.start(*hosts, source=saving(tmp_path), before=here.command())
        ranks = pids(launcher.wait_for("pid ", 2))
        assert launcher.process is not None
        if how == "cable":
            here.link("down")
        else:
            clients = [p for p in below(launcher.process.pid) if command_of(p).startswith(b"ssh\0")]
            os.kill(clients[0], signal.SIGSTOP)
        status, _, err = launcher.finish()
        assert status == 1
        assert f"rank 1 on {there.address} was lost: nothing was received from {there.address} for 3 s" in err
        assert_gone(ranks)
    if how == "cable":  # with ssh killed, the agent there hears of the launcher's end at once
        assert saved(tmp_path) == ["saved0", "saved1"]


def test_a_stopped_launcher_loses_its_ranks_which_say_why(launcher: Launcher, tmp_path: Path) -> None:
    launcher.start("-np", "2", *SHORT, source=saving(tmp_path))
    ranks = pids(launcher.wait_for("pid ", 2))
    launcher.signal(signal.SIGSTOP)
    assert_gone(ranks)
    assert saved(tmp_path) == ["saved0", "saved1"]
    launcher.signal(signal.SIGCONT)
    status, _, err = launcher.finish()
    assert status == 1
    assert re.search(
        r"rank \d on localhost was ended by its agent: nothing was received from the launcher", err
    )
    assert "ending the ranks of this host" in err


def test_ctrl_z_ends_nobody(launcher: Launcher) -> None:
    source = RANK + "os.write(1, b'up\\n'); time.sleep(5.5); print('done')"
    launcher.start("-np", "1", *SHORT, source=source, group=True)
    launcher.wait_for("up", 1)
    assert launcher.process is not None
    stat = Path(f"/proc/{launcher.process.pid}/stat")
    launcher.signal(signal.SIGTSTP)
    wait_until(lambda: stat.read_bytes().rpartition(b")")[2].split()[0] == b"T", "a stop")
    time.sleep(4.5)  # the time of which the test is
    launcher.signal(signal.SIGCONT)
    status, out, err = launcher.finish()
    assert (status, out.splitlines()[-1]) == (0, "[0] done"), err


def test_output_that_nobody_reads_ends_nobody(launcher: Launcher) -> None:
    source = RANK + "os.write(1, b'up\\n')\nfor i in range(3000): print('x' * 1000)\n"
    launcher.start("-np", "2", *SHORT, source=source)
    launcher.wait_for("up", 2)
    time.sleep(4.5)  # the time of which the test is
    status, out, err = launcher.finish()
    assert (status, out.count("x" * 1000)) == (0, 6000), err


def test_output_that_is_read_after_the_end_of_the_ranks_is_whole(launcher: Launcher) -> None:
    source = RANK + "os.write(1, b'up\\n')\nfor i in range(300): print('x' * 1000)\n"
    launcher.start("-np", "1", *SHORT, source=source)
    launcher.wait_for("up", 1)
    time.sleep(4.5)  # the time of which the test is: the agent has ended long since
    status, out, err = launcher.finish()
    assert (status, out.count("x" * 1000)) == (0, 300), err


def test_a_stopped_agent_is_reported_though_nobody_reads_and_leaves_no_rank(
    launcher: Launcher, tmp_path: Path
) -> None:
    launcher.start("-np", "2", *SHORT, source=saving(tmp_path, "os.write(1, b'x' * 4000 + b'\\n')", 0.0))
    ranks = pids(launcher.wait_for("pid ", 2))
    agent, _ = agent_and_guard(launcher)
    time.sleep(0.3)  # most pipes are full by now, but it does not matter
    os.kill(agent, signal.SIGSTOP)
    assert_gone([*ranks, agent])
    assert launcher.process is not None
    assert launcher.process.wait(DEADLINE_S) != 0


def test_kill_9_of_the_guard_of_a_stopped_agent_leaves_nothing(launcher: Launcher) -> None:
    launcher.start("-np", "1", *SHORT, source=WAITING)
    ranks = pids(launcher.wait_for("pid ", 1))
    agent, guard = agent_and_guard(launcher)
    os.kill(agent, signal.SIGSTOP)
    os.kill(guard, signal.SIGKILL)
    assert launcher.finish()[0] == 1
    assert_gone([*ranks, agent, guard])
