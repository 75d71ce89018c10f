"""Whatever is killed, no process of a job and nothing in /dev/shm outlives it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import FAMILY, ROOT, WAITING, Launcher, assert_gone, is_running, pids, wait_until

#: Each rank has a semaphore that a spawned worker holds, too; its name is printed.
SEMAPHORE = """
import multiprocessing, os, time, signal

def work(semaphore):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.write(1, b"pid %d\\n" % os.getpid())
    time.sleep(600)

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    semaphore = spawn.Semaphore()
    os.write(1, b"semaphore %s\\n" % semaphore._semlock.name.encode())
    spawn.Process(target=work, args=(semaphore,), daemon=True).start()
    os.write(1, b"pid %d\\n" % os.getpid())
    time.sleep(600)
"""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def the_launcher(launcher: Launcher, rank: int) -> list[int]:
    assert launcher.process is not None
    return [launcher.process.pid]


def the_agent(launcher: Launcher, rank: int) -> list[int]:
    return [parent(rank)]


def the_guard(launcher: Launcher, rank: int) -> list[int]:
    return [parent(parent(rank))]


def agent_and_guard(launcher: Launcher, rank: int) -> list[int]:
    return [parent(parent(rank)), parent(rank)]


def a_rank(launcher: Launcher, rank: int) -> list[int]:
    return [rank]


VICTIMS = [the_launcher, the_agent, the_guard, agent_and_guard, a_rank]
Victim = Callable[[Launcher, int], list[int]]


@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_9_leaves_no_process(launcher: Launcher, victim: Victim) -> None:
    launcher.start("-np", "2", "--term-grace-s", "1", source=FAMILY + WAITING)
    everyone = pids(launcher.wait_for("pid ", 6))
    ranks = [pid for pid in everyone if parent(pid) not in everyone and _has_child_in(pid, everyone)]
    assert len(ranks) == 2
    victims = victim(launcher, ranks[0])
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    try:
        assert launcher.process is not None
        if victims[0] != launcher.process.pid:
            status, _, err = launcher.finish()
            assert status == (137 if victim is a_rank else 1)
            assert "rank 0 on localhost was" in err or "was killed by SIGKILL" in err
    finally:
        assert_gone([*everyone, *victims])


@pytest.mark.parametrize("victim", VICTIMS[:3] + VICTIMS[4:])
def test_kill_9_leaves_no_semaphore(launcher: Launcher, victim: Victim) -> None:
    launcher.start("-np", "2", "--term-grace-s", "1", source=SEMAPHORE)
    launcher.wait_for("pid ", 4)
    everyone = pids(launcher.out)
    names = re.findall(rb"semaphore /(\S+)", launcher.out)
    files = [Path("/dev/shm") / f"sem.{name.decode()}" for name in names]
    assert len(files) == 2
    assert all(path.exists() for path in files)
    ranks = [pid for pid in everyone if parent(pid) not in everyone]
    for pid in victim(launcher, ranks[0]):
        os.kill(pid, signal.SIGKILL)
    assert_gone(everyone)
    wait_until(lambda: not any(path.exists() for path in files), f"the end of {files}", 10.0)


def test_second_ctrl_c_leaves_no_semaphore(launcher: Launcher) -> None:
    source = SEMAPHORE.replace(
        "    spawn = ", "    signal.signal(signal.SIGINT, lambda *_: None)\n    spawn = "
    )
    launcher.start("-np", "1", source=source)
    launcher.wait_for("pid ", 2)
    name = re.findall(rb"semaphore /(\S+)", launcher.out)[0].decode()
    for _ in range(2):
        launcher.signal(signal.SIGINT)
        wait_until(lambda: b"SIGINT" in launcher.err or not _pending(launcher), "the signal's arrival")
    launcher.finish()
    assert not (Path("/dev/shm") / f"sem.{name}").exists()


def _pending(launcher: Launcher) -> bool:
    assert launcher.process is not None
    try:
        status = Path(f"/proc/{launcher.process.pid}/status").read_text()
    except OSError:
        return False
    return any(int(bits, 16) for bits in re.findall(r"(?:Sig|Shd)Pnd:\s+(\w+)", status))


NOBODY = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]


def python_for_everybody() -> str:
    """A Python that an ordinary user may run, and that has what this one has; empty: there is none."""
    program = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', 'import polyhvd']))"
    system = f"/usr/bin/python3.{sys.version_info.minor}"
    for python in (sys.executable, system):
        with contextlib.suppress(OSError):  # no setpriv
            if subprocess.run([*NOBODY, python, "-c", program], env=everything_here()).returncode == 0:
                return python
    return ""


def everything_here() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_9_leaves_no_process_of_an_ordinary_user(launcher: Launcher, victim: Victim) -> None:
    python = python_for_everybody() if os.geteuid() == 0 else sys.executable
    if not python:
        pytest.skip("needs setpriv, and an installation that others than root may use")
    before = NOBODY if os.geteuid() == 0 else []
    argv = [python, "-c", FAMILY + WAITING]
    launcher.start(
        "-np", "2", "--term-grace-s", "1", argv=argv, before=before, python=python, env=everything_here()
    )
    everyone = pids(launcher.wait_for("pid ", 6))
    ranks = [pid for pid in everyone if parent(pid) not in everyone and _has_child_in(pid, everyone)]
    for pid in victim(launcher, ranks[0]):
        os.kill(pid, signal.SIGKILL)
    assert_gone(everyone)


def _has_child_in(pid: int, processes: list[int]) -> bool:
    return any(is_running(other) and parent(other) == pid for other in processes)
