"""Jobs of LSF, which cannot be installed here: its variables as documented, and scripts for its programs.

The scripts, blaunch and jsrun on PATH, only execute the command that they are given: blaunch without a look
at the host, jsrun as often as its options say, with the variables of JSM. They show that the processes get
their streams and places; that LSF's own programs take these options, only the documentation says.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from joining import WORK, Job, environment

RUN = [sys.executable, "-m", "polyhvd.launch"]
BLAUNCH = """#!/bin/sh
echo "blaunch $1" >> "$STARTED"
shift
exec "$@"
"""
JSRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
options = {{}}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    if name == "--env":
        name, _, value = words.pop(0).partition("=")
        os.environ[name] = value
    options[name] = value
hosts, tasks = int(options["--nrs"]), int(options["--tasks_per_rs"])
assert set(options) >= {{"--cpu_per_rs", "--gpu_per_rs", "--rs_per_host", "--bind"}}
ranks = []
for rank in range(hosts * tasks):
    place = dict(RANK=rank, SIZE=hosts * tasks, LOCAL_RANK=rank % tasks)
    env = {{f"JSM_NAMESPACE_{{name}}": str(value) for name, value in place.items()}}
    env |= dict(PMIX_RANK=str(rank), PMIX_NAMESPACE="7", OMPI_COMM_WORLD_RANK=str(rank),
                OMPI_COMM_WORLD_SIZE=str(hosts * tasks))
    ranks.append(subprocess.Popen(words, env={{**os.environ, **env}}))
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    for name, text in (("blaunch", BLAUNCH), ("jsrun", JSRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    return environment(
        PATH=f"{tmp_path}:{os.environ['PATH']}",
        STARTED=str(tmp_path / "started"),
        POLYHVD_SHARED_DIR=str(tmp_path / "shared"),
        LSB_JOBID="17",
        LSB_MCPU_HOSTS="127.0.0.1 2 127.0.0.2 2",  # the second plays another host
    )


def run(words: list[str], env: dict[str, str]) -> tuple[int, str, str]:
    with Job() as job:
        job.start([*RUN, *words], env)
        return job.finish()[0]


def test_agents_start_by_blaunch_on_other_hosts_alone(env: dict[str, str]) -> None:
    status, out, error = run([sys.executable, "-c", WORK], env)
    assert status == 0, error
    assert sorted(line.partition("] ")[2] for line in out.splitlines()) == [
        f"place {rank} 4 {rank % 2} 2 {rank // 2} 2 sum 10.0" for rank in range(4)
    ]
    assert Path(env["STARTED"]).read_text() == "blaunch 127.0.0.2\n"


def test_a_failure_of_a_far_rank_is_told_with_its_host(env: dict[str, str]) -> None:
    program = "import os, sys; sys.exit(7 * (os.environ['POLYHVD_RANK'] == '3'))"
    status, _, error = run([sys.executable, "-c", program], env)
    assert status == 7
    assert "rank 3 on 127.0.0.2 exited with status 7" in error


def test_jsrun_s_tasks_join_by_themselves(env: dict[str, str]) -> None:
    status, out, error = run(["--jsrun", "-np", "4", "--cycle-time-ms", "2", sys.executable, "-c", WORK], env)
    assert status == 0, error
    lines = [line.split() for line in out.splitlines()]
    assert sorted((line[1], line[2], line[-1]) for line in lines) == [(str(r), "4", "10.0") for r in range(4)]


def test_jsrun_s_command_line_is_shown_and_its_absence_told(env: dict[str, str]) -> None:
    words = ["--jsrun", "-np", "4", "-x", "A=b", "python", "train.py"]
    status, out, _ = run(["--dry-run", "--binding-args=--smpiargs=off", *words], env)
    assert status == 0
    assert out.split() == [
        *("jsrun", "--nrs=2", "--rs_per_host=1", "--tasks_per_rs=2", "--cpu_per_rs=ALL_CPUS"),
        *("--gpu_per_rs=ALL_GPUS", "--bind=none", "--launch_distribution=packed", "--env", "A=b"),
        *("--smpiargs=off", "python", "train.py"),
    ]
    for words, message in (
        (["--jsrun", "--output-filename", "o", "true"], "--output-filename is not for --jsrun: give its"),
        (["--jsrun", "-np", "3", "true"], "3 ranks cannot be distributed equally over 2 hosts"),
        (["--jsrun", "-H", "a:1", "true"], "--jsrun is for jobs of LSF, on the hosts of the job"),
    ):
        status, _, error = run(words, env)
        assert status == 2
        assert message in error
    Path(env["PATH"].partition(":")[0], "jsrun").unlink()
    status, _, error = run(["--jsrun", "-np", "4", "true"], env)
    assert status == 2
    assert "jsrun is not on PATH" in error
