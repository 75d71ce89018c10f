"""What cannot work is reported in one line, with a status other than 0, before anything is started."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from joining import DEADLINE_S, ROOT, environment

PROGRAM = [sys.executable, "-c", "print('started')"]
#: Seconds of the processor, which do not depend on what else the machine does.
CPU_S_MAX = 2.0


def run(words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "polyhvd.launch", *words],
        env=environment(**variables),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime < before.ru_utime + before.ru_stime + CPU_S_MAX
    return done


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-np", "1000000"], "1000000 ranks on localhost: a host takes 4096 ranks at most"),
        (["-H", "localhost:5000"], "5000 ranks on localhost: a host takes 4096 ranks at most"),
        (["--nproc-per-node", "0"], "--nproc-per-node 0: must be 1 or more"),
        (["--nproc-per-node", "2", "-np", "3"], "--nproc-per-node 2 and -np 3 differ on a single host"),
        (["--nproc-per-node", "2", "--slots-per-host", "3"], "and --slots-per-host 3 differ"),
        (["-p", "99999999"], "ssh's port 99999999 (-p): ports are from 1 to 65535"),
        (["-p", "0", "-H", "a"], "ssh's port 0 (-p): ports are from 1 to 65535"),
        (["-np", "2", "-H", "localhost:0"], "'0' is not a number of slots (1 or more)"),
        (
            ["-np", "2", "--output-filename", "/etc/passwd"],
            "--output-filename /etc/passwd: /etc/passwd/rank.0",
        ),
    ],
)
def test_options_that_cannot_work_are_a_line(options: list[str], expected: str) -> None:
    done = run([*options, *PROGRAM])
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done
    assert expected in done.stderr


def test_times_that_are_as_good_as_for_ever_are_taken() -> None:
    options = ["-np", "2", "--start-timeout", "1e12", "--term-grace-s", "inf"]
    done = run([*options, *PROGRAM], POLYHVD_HEARTBEAT_TIMEOUT_S="1e300")
    assert (done.returncode, done.stdout.count("started")) == (0, 2), done


@pytest.mark.parametrize("hosts", [[], ["-H", "localhost"]])
def test_ranks_per_node_without_nodes_are_those_of_each_host(hosts: list[str]) -> None:
    done = run(["--nproc-per-node", "2", *hosts, *PROGRAM])
    assert (done.returncode, sorted(done.stdout.split())) == (0, ["[0]", "[1]", "started", "started"]), done


def test_ranks_of_several_programs_are_counted_for_each_host() -> None:
    done = run(["-np", "100000000", "-H", "localhost:999999999", *PROGRAM, ":", "-np", "1", *PROGRAM])
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "100000000 ranks on localhost: a host takes 4096 ranks at most" in done.stderr


@pytest.mark.parametrize(
    ("name", "value"), [("POLYHVD_CYCLE_TIME", "fast"), ("HOROVOD_CACHE_CAPACITY", "1.5")]
)
def test_a_setting_that_ranks_could_not_read_is_a_line_and_not_a_traceback_of_each(
    name: str, value: str
) -> None:
    done = run(["-np", "2", *PROGRAM], **{name: value})
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1), done
    assert f"polyhvdrun: {name}='{value}': must be a" in done.stderr


def test_a_job_of_one_container_says_that_it_leaves_out_the_others(tmp_path: Path) -> None:
    config = tmp_path / "input/config"
    config.mkdir(parents=True)
    (config / "resourceconfig.json").write_text(json.dumps({"hosts": ["b", "a"], "current_host": "b"}))
    done = run(["-np", "1", *PROGRAM], SAGEMAKER_BASE_DIR=str(tmp_path))
    assert done.returncode == 0
    assert "this job uses only b, one of the containers a, b; start polyhvdrun --sagemaker" in done.stderr


def test_a_working_directory_that_was_removed_is_a_line(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    words = [sys.executable, "-m", "polyhvd.launch", "-np", "2", *PROGRAM]
    done = subprocess.run(
        ["sh", "-c", 'rmdir "$PWD"; exec "$@"', "sh", *words],
        env=environment(PYTHONPATH=str(ROOT)),
        cwd=gone,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (done.returncode, done.stdout) == (2, ""), done
    assert done.stderr == (
        "polyhvdrun: the working directory, in which ranks would start, was removed; cd to another one\n"
    )


COMMANDS = (
    ["polyhvd.launch", "-cb"],
    ["polyhvd.launch", "--check"],
    ["polyhvd.launch", "--dry-run", "-np", "2", "true"],
    ["polyhvd.cli", "--help"],
    ["polyhvd.cli", "doctor"],
    ["polyhvd.cli", "parity", "--list"],
)


def printed_to(file: IO[bytes], words: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *words],
        env=environment(**variables),
        cwd=ROOT,
        stdout=file,
        stderr=subprocess.PIPE,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.parametrize("words", [*COMMANDS, ["polyhvd.launch", "--help"]], ids=" ".join)
def test_output_into_a_closed_pipe_is_no_error(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = printed_to(closed, words)
    assert done.stderr == ""
    assert done.returncode in (0, 1)  # argparse ignores it


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_output_to_a_full_disk_is_an_error_of_one_line(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = printed_to(full, words, PYTHONUNBUFFERED="")  # or argparse ignores the error
    program = {"polyhvd.launch": "polyhvdrun", "polyhvd.cli": "polyhvd"}[words[0]]
    assert done.stderr == f"{program}: cannot write standard output: No space left on device\n"
    assert done.returncode == 1
