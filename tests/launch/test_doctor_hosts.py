"""polyhvd doctor on several hosts: network namespaces with an sshd in each, and some things wrong."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import netns
import pytest
import sshd
from launching import DEADLINE_S, ROOT, below, is_running

from polyhvd.launch.hosts.checks import Problem
from polyhvd.launch.hosts.diagnosis import as_json, problems_of, text
from polyhvd.launch.hosts.survey import HostFindings

pytestmark = pytest.mark.slow

needs_hosts = pytest.mark.skipif(
    not (netns.available() and sshd.available()), reason="needs root, iproute2 and openssh-server"
)

FACTS: dict[str, Any] = {
    "python": {"version": "3.11.2", "path": "/p"},
    "packages": {"polyhvd": "1.0", "NumPy": "1.26"},
    "packages_problem": "",
    "cores": {"installed": 8, "usable": 4, "affinity": "0-3", "quota": None},
    "limits": {"open_files": 65536, "locked_memory": None},
    "shared_memory": {"path": "/dev/shm", "free": 1 << 30, "size": 1 << 30, "files": -1, "problem": ""},
    "memory": {"total": 1 << 34, "available": 1 << 33, "cgroup_limit": None, "cgroup_used": None},
    "huge_pages": "madvise",
    "interfaces": [["lo", "127.0.0.1"], ["eth0", "10.0.0.1"]],
}


def host(name: str, **different: Any) -> HostFindings:
    """Findings of a good host, with some facts of its own."""
    return HostFindings(name, facts={**FACTS, **different}, clock=(0.001, 0.002), chosen="10.0.0.1")


def words(*hosts: HostFindings) -> list[str]:
    return [f"{item.host}: {item.what}: {item.found}" for item in problems_of(hosts)]


def test_good_hosts_have_no_problems() -> None:
    assert words(host("a"), host("b")) == []
    assert sum(line.split()[-1] == "madvise" for line in text([host("a"), host("b")]) if line) == 2
    assert text([host("a"), host("b")])[-1] == "No problems on 2 hosts."


def test_versions_that_differ_are_one_problem_each_and_name_the_odd_ones() -> None:
    other = {"polyhvd": "1.0", "NumPy": "2.0"}
    assert words(host("a"), host("b", packages=other), host("c")) == [
        "b: versions: NumPy: 1.26 on a, c; 2.0 on b"
    ]
    assert words(host("a"), host("b", packages={"polyhvd": "1.0"})) == [
        "b: versions: NumPy: 1.26 on a; none on b"
    ]
    assert words(host("a"), host("b", python={"version": "3.12.1", "path": "/p"})) == [
        "b: versions: Python: 3.11 on a; 3.12 on b"
    ]


def test_names_of_one_machine_are_a_problem() -> None:
    assert words(host("a", identity="n1 00"), host("b", identity="n2 11"), host("c", identity="n1 00")) == [
        "c: one machine: a is this machine under another name, which calls itself n1"
    ]


def test_limits_that_are_too_low_are_problems() -> None:
    assert words(host("a", limits={"open_files": 1000, "locked_memory": 0})) == [
        "a: open files: only 1000 may be open"
    ]
    small = {**FACTS["shared_memory"], "free": 32 << 20, "size": 64 << 20}
    assert words(host("a", shared_memory=small)) == ["a: shared memory: /dev/shm has 32 MB of 64 MB free"]
    full = {**FACTS["memory"], "cgroup_limit": 100 << 20, "cgroup_used": 96 << 20}
    assert words(host("a", memory=full)) == ["a: memory: the control group uses 96 MB of 100 MB"]


def test_a_clock_counts_as_off_beyond_what_could_be_measured() -> None:
    found = host("a")
    for clock, expected in (((1.5, 0.4), True), ((-1.5, 0.4), True), ((1.5, 0.6), False)):
        found.clock = clock
        assert bool(words(found)) == expected


def test_json_is_as_its_page_says() -> None:
    page = (ROOT / "docs" / "doctor.md").read_text()
    missing = HostFindings("b", problems=[Problem("b", "refused", "x", "y")])
    one = host("a")
    one.links = [{"to": "b", "reached": False, "tried": [["10.0.0.2", "timed out"]]}]
    report = as_json([one, missing])
    for key in [*report, *report["hosts"][0], *report["links"][0], *report["problems"][0]]:
        assert f"`{key}`" in page, key
    assert report["healthy"] is False
    assert report["hosts"][1]["examined"] is False
    assert report["links"] == [
        {
            "from": "a",
            "to": "b",
            "reached": False,
            "address": None,
            "from_address": None,
            "latency_us": None,
            "bandwidth_mb_s": None,
            "failed": [{"address": "10.0.0.2", "reason": "timed out"}],
        }
    ]


# Real hosts


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[netns.Namespace], list[str]]]:
    """Three hosts of which every two have a network of their own, and options that reach them by ssh."""
    with netns.pairwise_hosts(3) as made, sshd.sshd_on(tmp_path_factory.mktemp("ssh"), made[1:]) as options:
        yield made, options


def command(*options: str) -> list[str]:
    return ["env", f"PYTHONPATH={ROOT}", sys.executable, "-m", "polyhvd.cli", "doctor", *options]


def doctor(on: netns.Namespace, *options: str) -> subprocess.CompletedProcess[str]:
    """Run it on a host."""
    argv = on.command(*command(*options))
    return subprocess.run(argv, capture_output=True, text=True, timeout=4 * DEADLINE_S, cwd="/")


@needs_hosts
def test_hosts_are_examined_and_every_two_are_measured(
    hosts: tuple[list[netns.Namespace], list[str]],
) -> None:
    (first, second, third), options = hosts
    listed = f"localhost,{second.address},{third.address}"
    done = doctor(first, *options, "-H", listed, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["healthy"] is True
    assert [item["examined"] for item in report["hosts"]] == [True, True, True]
    for item in report["hosts"]:
        assert abs(item["clock"]["ahead_s"]) <= item["clock"]["exact_s"]  # they have one clock
    assert report["hosts"][1]["chosen"]["interface"] == "to0"
    assert report["hosts"][1]["chosen"]["address"] == "10.213.1.2"
    ways = {(link["from"], link["to"]): link for link in report["links"]}
    assert len(ways) == 6
    assert all(link["reached"] for link in ways.values())
    assert ways[second.address, third.address]["address"] == "10.213.12.3"  # of the network between them
    assert all(0 < link["latency_us"] < 1e6 and link["bandwidth_mb_s"] > 0 for link in ways.values())


@needs_hosts
def test_a_host_that_is_absent_and_a_cable_that_is_cut_are_rows_and_the_rest_goes_on(
    hosts: tuple[list[netns.Namespace], list[str]],
) -> None:
    (first, second, third), options = hosts
    second.run("ip", "link", "set", "to2", "down", check=True)
    try:
        done = doctor(
            first,
            *options,
            "-H",
            f"localhost,{second.address},10.213.1.77,{third.address}",
            "--start-timeout",
            "8",
        )
    finally:
        second.run("ip", "link", "set", "to2", "up", check=True)
    assert done.returncode == 1, done.stdout
    problems = done.stdout.partition("Problems: ")[2]
    assert re.search(r"10.213.1.77  (no route|no answer)  ", problems), done.stdout
    assert re.search(rf"{second.address}  +unreachable  +it cannot connect to {third.address} \(", problems)
    assert re.search(rf"{third.address}  +unreachable  +it cannot connect to {second.address} \(", problems)
    versions = done.stdout.partition("\n\n")[0]
    assert len(versions.splitlines()) == 5  # three hosts below two lines of headings
    assert re.search(rf"^  {second.address}  .* none", done.stdout, re.M)


@needs_hosts
def test_where_no_host_can_be_examined_each_is_told_with_the_reason(
    hosts: tuple[list[netns.Namespace], list[str]],
) -> None:
    (first, second, third), options = hosts
    listed = f"{second.address},{third.address},no-such-host.invalid"
    done = doctor(first, *options, "-H", listed, "--remote-python", "/no/such/python")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "Problems: 3"
    assert [line.split()[:3] for line in lines[2:]] == [
        [second.address, "no", "Python"],
        [third.address, "no", "Python"],
        ["no-such-host.invalid", "unknown", "name"],
    ]


@needs_hosts
def test_other_versions_and_a_wrong_clock_are_found(
    hosts: tuple[list[netns.Namespace], list[str]], tmp_path: Path
) -> None:
    (first, second, _), options = hosts
    script = tmp_path / "python"  # whose time is fast on the second host
    script.write_text(
        f'#!/bin/sh\ncase "$*" in -I*) ;; *) exec {sys.executable} "$@";; esac\nshift 3\n'
        f'ip -o addr | grep -q {second.address} && fast="import time; now = time.time; '
        'time.time = lambda: now() + 30\n"\n'
        f'exec {sys.executable} -I -S -c "$fast$@"\n'
    )
    script.chmod(0o755)
    done = doctor(first, *options, "-H", f"localhost,{second.address}", "--remote-python", str(script))
    assert done.returncode == 1, done.stdout
    assert re.search(r"10.213.1.2  clock +its clock is (30.0|29.9) s ahead of this host's", done.stdout)


@needs_hosts
def test_kill_9_of_the_doctor_leaves_nothing_on_any_host(
    hosts: tuple[list[netns.Namespace], list[str]],
) -> None:
    (first, second, third), options = hosts
    deadline = time.monotonic() + DEADLINE_S
    listening, process = "", None
    while "10.213.12.3:" not in listening:  # a server of links is there, for a moment
        assert time.monotonic() < deadline
        if process is None or process.poll() is not None:
            process = first.popen(
                *command(*options, "-H", f"localhost,{second.address},{third.address}"),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
            )
        listening = third.run("ss", "-Hltn", capture_output=True).stdout
    assert process is not None
    mine = [process.pid, *below(process.pid)]
    process.send_signal(signal.SIGKILL)
    process.wait()
    for at in (first, second, third):
        while "python" in _names(at):
            assert time.monotonic() < deadline + DEADLINE_S, _names(at)
            time.sleep(0.1)
    assert not any(is_running(pid) for pid in mine)


def _names(at: netns.Namespace) -> str:
    pids = subprocess.run(["ip", "netns", "pids", at.name], capture_output=True, text=True).stdout.split()
    found = []
    for pid in pids:
        try:
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return "\n".join(found)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-H", "a:0"], "'0' is not a number of slots"),
        (["-H", "-oProxyCommand=x"], "expected one argument"),
        (["-H", "a:1,a:1"], "names a twice"),
        (["--hostfile", "/no/such/file"], "cannot read the host file"),
        (["-H", "localhost", "-p", "65536"], "ports are from 1 to 65535"),
        (["-H", "localhost", "--start-timeout", "-1"], "must be above 0"),
        (["-H", "localhost", "--network-interface", "nope0"], "there is no network interface 'nope0'"),
    ],
)
def test_a_wrong_command_line_is_refused(options: list[str], words: str) -> None:
    done = subprocess.run(command(*options), capture_output=True, text=True, cwd="/", env={**os.environ})
    assert done.returncode == 2
    assert words in done.stderr


def test_a_machine_that_is_named_twice_is_found() -> None:
    argv = command("-H", "localhost,127.0.0.1")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=4 * DEADLINE_S, cwd="/")
    assert done.returncode == 1
    (line,) = (line for line in done.stdout.splitlines() if "one machine" in line)
    assert line.startswith("  127.0.0.1")
    assert "localhost is this machine under another name" in line
    assert line.endswith("name it once, with all its slots")


def test_a_host_whose_ssh_leaves_a_process_with_its_output_is_given_up(tmp_path: Path) -> None:
    wrapper = tmp_path / "ssh"
    wrapper.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/left\nwait\n")
    wrapper.chmod(0o755)
    argv = command("-H", "localhost,127.0.0.4", "--start-timeout", "2")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60, cwd="/", env=env)
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert done.returncode == 1
    assert re.search(r"^  127\.0\.0\.4  no answer  no answer within 2 s", done.stdout, re.M)
