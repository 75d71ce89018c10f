"""What polyhvdrun says of hosts that cannot take part: all of them at once, before anything has started."""

from __future__ import annotations

import ast
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import sshd
from launching import DEADLINE_S, ROOT, Launcher, assert_gone, below, is_running

import polyhvd
from polyhvd.launch.hosts import facts as host_facts
from polyhvd.launch.hosts import findings as host_findings
from polyhvd.launch.hosts import links as host_links
from polyhvd.launch.hosts.checks import Problem, judge, table, unreachable
from polyhvd.rendezvous import auth, network

GOOD = {
    "clock": 1000.0,
    "cwd": "",
    "room": {"/dev/shm": {"free": 1 << 30, "size": 1 << 31, "files": -1, "problem": ""}},
    "programs": [{"name": "python", "path": "/usr/bin/python", "is_python": "yes", "polyhvd": "1.0"}],
}

#: An elastic program that ends when another host is being checked.
UNTIL_ASKED = """
import pathlib, sys, time
import polyhvd.numpy as hvd
hvd.init()

@hvd.elastic.run
def train(state):
    while not pathlib.Path(sys.argv[1], "asked").exists():
        time.sleep(0.05)

train(hvd.elastic.ArrayState())
"""

needs_sshd = pytest.mark.skipif(not sshd.available(), reason="needs openssh-server")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for mounts of its own")


def words(facts: dict[str, object], asked: float = 1000.0, answered: float = 1000.0) -> list[str]:
    """What is wrong with a host with these facts beside those of a good one."""
    problems = judge("h", {**GOOD, **facts}, asked, answered, "1.0", "/work")
    return [f"{item.what}: {item.found}" for item in problems]


def test_a_good_host_has_no_problems() -> None:
    assert words({}) == []


@pytest.mark.parametrize(
    ("clock", "text"),
    [
        (1100.0, "clock: its clock is 95 s ahead of this host's"),
        (900.0, "clock: its clock is 100 s behind this host's"),
        (1064.0, None),  # it may have been read at any time from 1000 to 1005
        (941.0, None),
    ],
)
def test_a_clock_is_off_only_if_the_time_of_the_answer_does_not_explain_it(
    clock: float, text: str | None
) -> None:
    assert words({"clock": clock}, 1000.0, 1005.0) == ([text] if text else [])


def test_other_versions_are_told_and_unknown_ones_pass() -> None:
    python = {"name": "python", "path": "/p", "is_python": "yes"}
    assert words({"programs": [{**python, "polyhvd": "0.9"}]}) == [
        "version: /p has 0.9, this polyhvdrun is 1.0"
    ]
    assert words({"programs": [{**python, "polyhvd": ""}]}) == ["no polyhvd: /p has none"]
    assert words({"programs": [{**python, "polyhvd": "unknown"}]}) == []
    assert words({"programs": [{"name": "sh", "path": "/bin/sh", "polyhvd": ""}]}) == []


def test_lack_of_room_is_told() -> None:
    full = {"free": 100, "size": 64 << 20, "files": -1, "problem": ""}
    assert words({"room": {"/dev/shm": full}}) == ["no room: /dev/shm: 0 KB are free of 65536 KB"]
    assert words({"room": {"/tmp": {**full, "free": 1 << 30, "files": 0}}}) == [
        "no room: /tmp: no further file can be made"
    ]
    absent = {"problem": "No such file or directory"}
    assert words({"room": {"/dev/shm": absent}}) == []  # nothing of polyhvd's needs it
    assert words({"room": {"/tmp": absent}}) == ["no room: /tmp: No such file or directory"]


@pytest.mark.parametrize(
    ("status", "said", "what"),
    [
        (255, "ssh: connect to host h port 22: No route to host", "no route"),
        (255, "ssh: connect to host h port 22: Connection timed out", "no answer"),
        (255, "root@h: Permission denied (publickey).", "key"),
        (255, "Connection reset by 10.0.0.1 port 22", "ssh cut off"),
        (127, "ssh: 1: exec: ssh: not found", "no ssh here"),
        (126, "bash: /p: Permission denied", "no Python"),
        (1, "SyntaxError: invalid syntax", "old Python"),
        (2, "Unknown option: -I", "old Python"),
        (9, "hm", "no agent"),
    ],
)
def test_the_words_of_ssh_are_understood(status: int, said: str, what: str) -> None:
    problem = unreachable("h", "ssh", status, ["a banner", said], "/p")
    assert problem.what == what
    assert said in problem.found


def test_tables_are_aligned_and_obey_no_terminal_codes() -> None:
    lines = table([Problem("a", "no answer", "x\x1b[2J", "y"), Problem("a-long-one", "key", "z", "w")])
    assert lines.splitlines() == [
        "  host        problem    found, and what to do",
        "  a           no answer  x\\x1b[2J; y",
        "  a-long-one  key        z; w",
    ]


# On hosts


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Options of polyhvdrun that reach 127.0.0.2 and 127.0.0.3."""
    if not sshd.available():
        pytest.skip("needs openssh-server")
    with sshd.sshd(tmp_path_factory.mktemp("ssh"), "127.0.0.2", "127.0.0.3") as options:
        yield options


def python_of_its_own(folder: Path, *, version: str = "", before: str = "") -> Path:
    """A Python with this version of polyhvd, or none, and a program that runs before any other in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    if version:
        (site / f"polyhvd-{version}.dist-info").mkdir()
        (site / f"polyhvd-{version}.dist-info/METADATA").write_text(f"Name: polyhvd\nVersion: {version}\n")
    if before:
        script = folder / "python"
        script.write_text(f'#!/bin/sh\nshift 3\nexec {folder}/bin/python -I -S -c "{before}\n$@"\n')
        script.chmod(0o755)
        return script
    return folder / "bin/python"


def assert_nothing_has_run(out: str, mark: Path) -> None:
    assert out == ""
    assert not mark.exists()


def test_all_unfit_hosts_are_told_at_once_and_nothing_is_started(
    launcher: Launcher, ssh: list[str], tmp_path: Path
) -> None:
    mark = tmp_path / "mark"
    source = f"open({str(mark)!r}, 'w')\nprint('ran')"
    hosts = "localhost:1,127.0.0.2:1,127.0.0.9:1,no-such-host.invalid:1,127.0.0.10:1"
    patient = ["--start-timeout", "600"]  # more than the harness waits
    status, out, err = launcher.run(*ssh, *patient, "-H", hosts, source=source)
    assert status == 1
    assert_nothing_has_run(out, mark)
    lines = err.splitlines()
    assert lines[0] == "polyhvdrun: 3 of 5 hosts cannot take part, and nothing was started:"
    assert [line.split()[:2] for line in lines[1:]] == [
        ["host", "problem"],
        ["127.0.0.9", "refused"],
        ["no-such-host.invalid", "unknown"],
        ["127.0.0.10", "refused"],
    ]


def test_a_host_without_polyhvd_or_with_another_one_is_told(
    launcher: Launcher, ssh: list[str], tmp_path: Path
) -> None:
    for version, expected in (("", "no polyhvd"), ("9.9.1", "version")):
        python = python_of_its_own(tmp_path / f"v{version}", version=version)
        status, out, err = launcher.run(*ssh, "-H", "127.0.0.2:1", argv=[str(python), str(tmp_path / "x.py")])
        assert (status, out) == (1, "")
        assert re.search(rf"127.0.0.2  {expected} .*{python} has (none|9\.9\.1, this)", err), err


def test_a_program_that_is_no_python_needs_no_polyhvd(launcher: Launcher, ssh: list[str]) -> None:
    assert launcher.run(*ssh, "-H", "127.0.0.2:1", argv=["/bin/echo", "fine"])[:2] == (0, "[0] fine\n")


def test_a_wrong_clock_is_told(launcher: Launcher, ssh: list[str], tmp_path: Path) -> None:
    python = python_of_its_own(
        tmp_path / "v", before="import time; now = time.time; time.time = lambda: now() + 3600"
    )
    status, out, err = launcher.run(
        *ssh, "-H", "127.0.0.2:1", "--remote-python", str(python), source="print('ran')"
    )
    assert (status, out) == (1, "")
    assert re.search(r"127.0.0.2  clock  .*its clock is 3(600|599) s ahead of this host's; synchronize", err)


@needs_sshd
@needs_root
def test_no_room_and_an_absent_folder_are_told(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "parent" / "only-here"
    folder.mkdir(parents=True)
    mounts = (
        "mount --make-rprivate / && mount -t tmpfs -o size=512k full /dev/shm && "
        f'mount -t tmpfs empty {folder.parent} && exec "$@"'
    )
    within = ["unshare", "-m", "sh", "-c", mounts, "sh"]
    with sshd.sshd(tmp_path, "127.0.0.2", within=within) as options:
        here = ["env", "-C", str(folder), f"PYTHONPATH={ROOT}"]
        launcher.start(*options, "-H", "127.0.0.2:1", source="print('ran')", before=here)
        status, out, err = launcher.finish()
    assert (status, out) == (1, "")
    assert re.search(r"127.0.0.2  no room  .*/dev/shm: 512 KB are free of 512 KB", err), err
    assert re.search(rf"127.0.0.2  folder   .*{folder}: No such file or directory", err), err


def hanging(folder: Path) -> str:
    """A Python that hangs when it is asked for polyhvd, and says so."""
    python = folder / "python"
    python.write_text(
        f"#!/bin/sh\necho $$ > {folder}/asking\nmv {folder}/asking {folder}/asked\nexec sleep 600\n"
    )
    python.chmod(0o755)
    return str(python)


def wait_until_asked(folder: Path) -> int:
    """Wait for that, and return the id of its process."""
    deadline = time.monotonic() + DEADLINE_S
    while not (folder / "asked").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int((folder / "asked").read_text())


def test_kill_9_of_the_launcher_during_the_checks_leaves_nothing(
    launcher: Launcher, ssh: list[str], tmp_path: Path
) -> None:
    launcher.start(*ssh, "-H", "127.0.0.2:1,127.0.0.9:1", argv=[hanging(tmp_path), "x.py"])
    asked = wait_until_asked(tmp_path)
    assert launcher.process is not None
    everyone = [asked, *below(launcher.process.pid)]
    assert is_running(asked)
    launcher.signal(signal.SIGKILL)
    assert_gone(everyone)


def test_ctrl_c_during_the_checks_ends_at_once(launcher: Launcher, ssh: list[str], tmp_path: Path) -> None:
    patient = ["--term-grace-s", "600"]  # more than the harness waits
    launcher.start(*ssh, *patient, "-H", "127.0.0.2:1", argv=[hanging(tmp_path), "x.py"])
    asked = wait_until_asked(tmp_path)
    launcher.signal(signal.SIGINT)
    status, out, _ = launcher.finish()
    assert (status, out) == (130, "")
    assert_gone([asked])


def test_a_connection_that_is_lost_during_the_checks_is_told(
    launcher: Launcher, ssh: list[str], tmp_path: Path
) -> None:
    launcher.start(*ssh, "-H", "127.0.0.2:1", argv=[hanging(tmp_path), "x.py"])
    wait_until_asked(tmp_path)
    assert launcher.process is not None
    for pid in below(launcher.process.pid):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ssh\0"):
            os.kill(pid, signal.SIGKILL)
    status, out, err = launcher.finish()
    assert (status, out) == (1, "")
    assert re.search(r"127.0.0.2  no agent  ssh ended with status -9", err), err


def test_a_host_that_hangs_is_given_up_in_time(launcher: Launcher, ssh: list[str], tmp_path: Path) -> None:
    options = [*ssh, "--start-timeout", "6", "-H", "127.0.0.2:1,127.0.0.3:1"]
    status, out, err = launcher.run(*options, argv=[hanging(tmp_path), "x.py"])
    assert (status, out) == (1, "")
    assert (
        len(re.findall(r"  no answer  its agent runs, but has not completed its checks within 6 s", err)) == 2
    )


def test_an_elastic_job_ends_without_waiting_for_a_host_that_is_being_checked(
    launcher: Launcher, ssh: list[str], tmp_path: Path
) -> None:
    python = Path(hanging(tmp_path))
    python.write_text(
        python.read_text().replace("\n", f'\n[ "$SSH_CONNECTION" ] || exec {sys.executable} "$@"\n', 1)
    )
    hosts = tmp_path / "hosts.sh"
    hosts.write_text("#!/bin/sh\necho localhost:1\necho 127.0.0.2:1\n")
    hosts.chmod(0o755)
    program = launcher.script(UNTIL_ASKED)
    launcher.start(
        *ssh, "-np", "1", "--min-np", "1", "--max-np", "2", "--host-discovery-script", str(hosts),
        argv=[str(python), program, str(tmp_path)],
    )  # fmt: skip
    asked = wait_until_asked(tmp_path)
    began = time.monotonic()
    status, _, err = launcher.finish()
    assert status == 0, err
    assert time.monotonic() - began < 15, err
    assert_gone([asked])


def test_run_raises_the_table(ssh: list[str]) -> None:
    with pytest.raises(OSError, match=r"1 of 1 host cannot take part.*\n.*\n  127.0.0.9  refused"):
        polyhvd.run(os.getpid, hosts="127.0.0.9:1", ssh_port=int(ssh[1]), start_timeout=20)


def test_programs_for_hosts_are_python_3_8() -> None:
    for module in (host_facts, host_findings, host_links, auth, network):
        assert module.__file__ is not None
        ast.parse(Path(module.__file__).read_text(), feature_version=(3, 8))


def test_no_secret_is_on_a_command_line_during_the_checks(
    launcher: Launcher, ssh: list[str], tmp_path: Path
) -> None:
    """The Python that is asked for polyhvd looks at all command lines, and at its own environment."""
    seen = tmp_path / "seen"
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\ncat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' ' > {seen}\nenv >> {seen}\n"
        "echo polyhvd-version unknown\n"
    )
    python.chmod(0o755)
    launcher.run(*ssh, "-H", "127.0.0.2:1", argv=[str(python), "x.py"])
    assert "polyhvd.launch" in seen.read_text()
    first = seen.read_text()
    secret = re.search("POLYHVD_SECRET=([0-9a-f]+)", first)  # of the rank, which comes last
    assert secret is not None
    assert first.count(secret.group(1)) == 1
