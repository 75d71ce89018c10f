"""polyhvdrun in jobs of a real Slurm of two hosts: agents by srun, signals, requeueing, what is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm
from joining import DEADLINE_S, WORK, environment
from launching import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm.available()), reason=slurm.available() or "there is Slurm"),
]

RUN = f"{sys.executable} -m polyhvd.launch"
#: Ranks that say which signals they get, and go on until SIGTERM; then they take their time to save.
SAVING = """
import os, signal, sys, time
rank = os.environ["POLYHVD_RANK"]
def say(text):
    os.write(1, f"{text} {rank} on {os.uname().nodename}\\n".encode())
def heed(number, _):
    say(signal.Signals(number).name)
    if number == signal.SIGTERM:
        time.sleep(1)
        say("saved")
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, heed)
restarts = [os.environ.get(f"{name}_RESTART_COUNT", "none") for name in ("SLURM", "POLYHVD")]
say(f"up pid {os.getpid()} restarts {' '.join(restarts)}")
while True:
    time.sleep(60)
"""


class Cluster:
    """Slurm's commands, and one job at a time."""

    def __init__(self, env: dict[str, str], folder: Path) -> None:
        self.env, self._folder = env, folder
        self.job = ""
        self._number = 0

    def call(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=DEADLINE_S)

    def submit(self, script: str, *options: str) -> None:
        """Queue a batch script."""
        self._number += 1
        path = self._folder / f"job{self._number}.sh"
        path.write_text(f"#!/bin/bash\n{script}\n")
        done = self.call("sbatch", "--parsable", "-N2", "-n4", *options, "-o", str(self._output), str(path))
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.strip()

    @property
    def _output(self) -> Path:
        return self._folder / f"out{self._number}"

    @property
    def said(self) -> str:
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def lines(self, word: str) -> list[str]:
        """What ranks have said that begins so, without their numbers at its beginning."""
        lines = (line.partition("] ")[2] for line in self.said.splitlines())
        return sorted(line for line in lines if line.startswith(word))

    def await_lines(self, word: str, count: int) -> list[str]:
        wait_until(
            lambda: len(self.lines(word)) >= count, f"{count} lines of {word}: {self.said}", DEADLINE_S
        )
        return self.lines(word)

    def finish(self) -> str:
        """Wait for the job's end; what it has printed."""
        wait_until(lambda: self.state() in ("", "CG"), f"the end of job {self.job}", DEADLINE_S)
        wait_until(lambda: self.state() == "", f"the end of all of job {self.job}", DEADLINE_S)
        return self.said

    def state(self) -> str:
        return self.call("squeue", "-h", "-o", "%t", "-j", self.job).stdout.strip()

    def cancel(self, *options: str) -> None:
        self.call("scancel", *options, self.job)

    def control(self, *words: str) -> None:
        done = self.call("scontrol", *words, self.job)
        assert done.returncode == 0, done.stderr

    def processes(self) -> list[int]:
        """What runs of the job, or of any other that carries its number, on both hosts."""
        mark = f"SLURM_JOB_ID={self.job}".encode()
        conf = f"SLURM_CONF={self.env['SLURM_CONF']}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if {mark, conf} <= set(path.read_bytes().split(b"\0")):
                    found.append(int(path.parent.name))
        return found

    def clean_up(self) -> None:
        if self.job:
            self.cancel("--full", "--signal=KILL")
            self.cancel()
            self.finish()


@pytest.fixture(scope="module")
def slurm_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield environment(**found)


@pytest.fixture
def cluster(slurm_env: dict[str, str], tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "work.py").write_text(WORK)
    (tmp_path / "saving.py").write_text(SAVING)
    found = Cluster({**slurm_env, "W": str(tmp_path / "work.py"), "S": str(tmp_path / "saving.py")}, tmp_path)
    yield found
    found.clean_up()


def command_lines() -> bytes:
    found = b""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += path.read_bytes() + b"\n"
    return found


PLACES = [f"place {rank} 4 {rank % 2} 2 {rank // 2} 2 sum 10.0" for rank in range(4)]


def test_a_batch_script_starts_ranks_on_every_host_of_its_allocation(cluster: Cluster) -> None:
    cluster.submit(f"{RUN} -v {sys.executable} $W; echo status $?")
    said = cluster.finish()
    assert cluster.lines("place") == PLACES
    assert "status 0" in said
    assert "n1:2,n2:2 (SLURM_JOB_NODELIST=n[1-2], SLURM_TASKS_PER_NODE=2(x2))" in said


def test_the_shell_of_salloc_does_so_too(cluster: Cluster) -> None:
    done = cluster.call("salloc", "-N2", "-n3", *RUN.split(), sys.executable, cluster.env["W"])
    assert done.returncode == 0, done.stderr
    places = sorted(line.partition("] ")[2] for line in done.stdout.splitlines())
    assert places == ["place 0 3 0 2 0 2 sum 6.0", "place 1 3 1 2 0 1 sum 6.0", "place 2 3 0 1 1 2 sum 6.0"]


def test_a_signal_before_the_time_limit_reaches_ranks(cluster: Cluster) -> None:
    """What --signal does of itself: Slurm looks at time limits twice a minute."""
    cluster.submit(f"exec {RUN} {sys.executable} $S", "--time=1", "--signal=B:USR1@60")
    cluster.await_lines("up", 4)
    cluster.await_lines("SIGUSR1", 4)


def test_run_has_the_hosts_of_the_allocation(cluster: Cluster) -> None:
    source = """
import os, polyhvd
def place():
    import polyhvd.numpy as hvd
    hvd.init()
    return hvd.rank(), hvd.size(), os.uname().nodename
if __name__ == "__main__":
    print("all", polyhvd.run(place))
    print("three", polyhvd.run(place, np=3, verbose=True))
    print("here", polyhvd.run(place, np=1, hosts="localhost"))
    try:
        polyhvd.run(place, np=5)
    except ValueError as error:
        print(error)
"""
    Path(cluster.env["W"]).write_text(source)
    cluster.submit(f"exec {sys.executable} $W")
    said = cluster.finish()
    assert "all [(0, 4, 'n1'), (1, 4, 'n1'), (2, 4, 'n2'), (3, 4, 'n2')]" in said, said
    assert "three [(0, 3, 'n1'), (1, 3, 'n1'), (2, 3, 'n2')]" in said
    assert "n1:2,n2:2 (SLURM_JOB_NODELIST=n[1-2], SLURM_TASKS_PER_NODE=2(x2))" in said
    assert "here [(0, 1, 'n1')]" in said
    assert "5 ranks were requested, but Slurm job" in said


def test_signals_reach_ranks_once_and_they_have_time_to_save(cluster: Cluster) -> None:
    cluster.submit(f"exec {RUN} {sys.executable} $S")
    cluster.await_lines("up", 4)
    cluster.cancel("--batch", "--signal=USR1")  # what --signal=B:USR1@60 does
    cluster.await_lines("SIGUSR1", 4)
    cluster.cancel("--signal=USR1")  # to every process of every step, as --signal=USR1@60 does
    cluster.await_lines("SIGUSR1", 8)
    cluster.cancel()
    cluster.finish()
    assert [len(cluster.lines(word)) for word in ("SIGUSR1", "SIGTERM", "saved")] == [8, 4, 4], cluster.said
    assert cluster.processes() == []


def test_a_requeued_job_saves_and_starts_anew(cluster: Cluster) -> None:
    cluster.submit(f"exec {RUN} {sys.executable} $S", "--requeue", "--open-mode=append")
    cluster.await_lines("up", 4)
    cluster.control("requeue")
    cluster.await_lines("saved", 4)
    wait_until(lambda: cluster.state() == "PD", "the job to wait again", DEADLINE_S)
    cluster.call("scontrol", "update", f"JobId={cluster.job}", "StartTime=now")
    ups = cluster.await_lines("up", 8)
    assert sum("restarts none none" in line for line in ups) == 4
    assert sum("restarts 1 1" in line for line in ups) == 4


def test_nothing_is_left_after_kill_9_of_polyhvdrun(cluster: Cluster) -> None:
    cluster.submit(f"{RUN} {sys.executable} $S & echo $! > $S.pid; wait; sleep 60")
    cluster.await_lines("up", 4)
    assert len(cluster.processes()) > 8
    os.kill(int(Path(f"{cluster.env['S']}.pid").read_text()), signal.SIGKILL)
    wait_until(lambda: len(cluster.processes()) <= 3, "the end of all but the script", DEADLINE_S)


@pytest.mark.parametrize("what", ["slurmstepd", "srun"])
def test_a_host_that_is_lost_ends_the_job(cluster: Cluster, what: str) -> None:
    cluster.submit(f"{RUN} --heartbeat-timeout-s 8 {sys.executable} $S; echo status $?")
    ups = cluster.await_lines("up", 4)
    on_second = [int(line.split()[2]) for line in ups if line.endswith("on n2")]
    assert len(on_second) == 2
    job = cluster.job
    pattern = (
        rf"^slurmstepd: \[{job}\.[0-9]" if what == "slurmstepd" else rf"^srun --jobid={job} .*nodelist=n2"
    )
    found = [int(pid) for pid in cluster.call("pgrep", "-f", pattern).stdout.split()]
    if what == "slurmstepd":  # the agent's guard is its child
        found = [pid for pid in found if pid == parent(parent(parent(on_second[0])))]
    assert found
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    said = cluster.finish()
    reason = "nothing was received from n2 for 8 s" if what == "slurmstepd" else "srun ended with status -9"
    assert f"on n2 was lost: {reason}" in said, said
    assert len(cluster.lines("saved")) in (2, 4)  # of n2, too, where its agent lives
    assert "status 1" in said
    assert cluster.processes() == []


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_the_secret_is_on_no_command_line_and_not_for_scontrol_to_show(cluster: Cluster) -> None:
    program = "import os, time; os.write(1, b'secret %s\\n' % os.environb[b'POLYHVD_SECRET']); time.sleep(60)"
    cluster.submit(f'{RUN} {sys.executable} -c "{program}"')
    secrets = {line.split()[1] for line in cluster.await_lines("secret", 4)}
    shown = command_lines().decode(errors="replace")
    assert "srun" in shown
    for kind in ("job", "step"):
        shown += cluster.call("scontrol", "--details", "show", kind, cluster.job).stdout
    assert len(secrets) == 1
    assert not any(secret in shown for secret in secrets)


def test_several_polyhvdruns_in_one_step_are_refused(cluster: Cluster) -> None:
    done = cluster.call("srun", "-N2", "-n4", *RUN.split(), sys.executable, cluster.env["W"])
    assert done.returncode == 2
    assert "srun has started this polyhvdrun as one of 4 (SLURM_PROCID=" in done.stderr
    assert "place" not in done.stdout


def test_more_ranks_than_slots_are_refused_and_one_host_takes_any_number(cluster: Cluster) -> None:
    cluster.submit(f"{RUN} -np 5 {sys.executable} $W; echo status $?\n{RUN} -np 3 --dry-run $W")
    said = cluster.finish()
    assert "5 ranks were requested, but Slurm job" in said
    assert "host n2 (by srun): rank 2" in said
    done = cluster.call("salloc", "-N1", "-n1", *RUN.split(), "-np", "3", sys.executable, cluster.env["W"])
    assert done.stdout.count("sum 6.0") == 3, done.stderr


def test_an_allocation_that_has_ended_is_named(cluster: Cluster) -> None:
    gone = {"SLURM_JOB_ID": "99", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "1(x2)"}
    cluster.env |= gone
    done = cluster.call(*RUN.split(), sys.executable, "-c", "pass")
    assert done.returncode == 1
    assert "was not started: srun ended with status 1" in done.stderr
    assert "Invalid job id specified" in done.stderr
