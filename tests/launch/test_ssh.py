"""Ranks on other hosts, over a real sshd of the test's own; 127.0.0.2 and 127.0.0.3 play the hosts."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sshd
from launching import FAMILY, RANK, WAITING, Launcher, assert_gone, below, pids

pytestmark = pytest.mark.skipif(not sshd.available(), reason="needs openssh-server")


@pytest.fixture(scope="module")
def ssh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Options of polyhvdrun that reach the test's sshd."""
    with sshd.sshd(tmp_path_factory.mktemp("ssh"), "127.0.0.2", "127.0.0.3") as options:
        yield options


HOSTS = ["-H", "localhost:1,127.0.0.2:2,127.0.0.3:1"]


def test_ranks_run_on_all_hosts(launcher: Launcher, ssh: list[str]) -> None:
    source = (
        RANK + "print(os.environ['POLYHVD_HOST_ID'], os.environ.get('SSH_CONNECTION', '- - here').split()[2])"
    )
    status, out, err = launcher.run(*HOSTS, *ssh, source=source)
    assert status == 0, err
    expected = ["[0] 0 here", "[1] 1 127.0.0.2", "[2] 1 127.0.0.2", "[3] 2 127.0.0.3"]
    assert sorted(out.splitlines()) == expected


def test_a_job_of_pbs_has_its_hosts_and_slots(launcher: Launcher, ssh: list[str], tmp_path: Path) -> None:
    nodes = tmp_path / "nodes"
    nodes.write_text("localhost\n127.0.0.2\n127.0.0.2\n127.0.0.3\n")
    env = {"PBS_JOBID": "17[3].server", "PBS_NODEFILE": str(nodes), "PBS_ENVIRONMENT": "PBS_BATCH"}
    source = RANK + "print(os.environ['POLYHVD_HOST_ID'])"
    status, out, err = launcher.run("-v", *ssh, source=source, env=env)
    assert (status, sorted(out.splitlines())) == (0, ["[0] 0", "[1] 1", "[2] 1", "[3] 2"]), err
    assert "PBS job 17[3].server: localhost:1,127.0.0.2:2,127.0.0.3:1 (PBS_NODEFILE=" in err


def test_environment_and_folder_go_along_and_the_secret_is_on_no_command_line(
    launcher: Launcher, ssh: list[str]
) -> None:
    source = RANK + (
        "import glob\n"
        "secret = os.environ['POLYHVD_SECRET'].encode()\n"
        "def read(path):\n"
        "  try: return open(path, 'rb').read()\n"
        "  except OSError: return b''\n"
        "seen = [p for p in glob.glob('/proc/[0-9]*/cmdline') if secret in read(p)]\n"
        "print(os.environ['MY_SETTING'], os.getcwd(), len(secret), seen)\n"
    )
    status, out, err = launcher.run(*HOSTS, *ssh, source=source, env={"MY_SETTING": "two words\nand lines"})
    assert status == 0, err
    assert out.count(f"and lines {os.getcwd()} 64 []") == 4


def test_ranks_on_several_hosts_connect(launcher: Launcher, ssh: list[str]) -> None:
    source = (
        "import os, time\n"
        "from polyhvd.config import Launched, Settings\n"
        "from polyhvd.launch.providers.local import meet_as\n"
        "from polyhvd.runtime import bootstrap\n"
        "bootstrap._segment_bytes = lambda ranks: 4096\n"
        "placement, store = meet_as(Launched.from_environment(), 0, time.monotonic() + 30)\n"
        "wiring = bootstrap.connect(Settings(), placement, store, [])\n"
        "print(wiring.domains, sorted(wiring.data_fds), sorted(wiring.local_fds))\n"
    )
    environment = {"PYTHONPATH": os.getcwd()}
    status, out, err = launcher.run(*HOSTS, *ssh, source=source, env=environment)
    assert status == 0, err
    assert sorted(out.splitlines()) == [
        "[0] [[0], [1, 2], [3]] [1, 2, 3] []",
        "[1] [[0], [1, 2], [3]] [0, 3] [2]",
        "[2] [[0], [1, 2], [3]] [0, 3] [1]",
        "[3] [[0], [1, 2], [3]] [0, 1, 2] []",
    ]


def test_failure_on_another_host_is_reported(launcher: Launcher, ssh: list[str]) -> None:
    source = RANK + "if rank == 3: raise ValueError('far away')\nwhile True: time.sleep(60)"
    status, _, err = launcher.run(*HOSTS, *ssh, source=source)
    assert status == 1
    assert "polyhvdrun: rank 3 on 127.0.0.3 exited with status 1" in err
    assert err.splitlines()[-1] == "[3] ValueError: far away"


def test_kill_9_of_the_launcher_leaves_no_process_on_any_host(launcher: Launcher, ssh: list[str]) -> None:
    launcher.start(*HOSTS, *ssh, source=FAMILY + WAITING)
    everyone = pids(launcher.wait_for("pid ", 12))
    launcher.signal(signal.SIGKILL)
    assert_gone(everyone)


def test_ctrl_c_reaches_all_hosts(launcher: Launcher, ssh: list[str]) -> None:
    launcher.start(*HOSTS, *ssh, source=WAITING)
    everyone = pids(launcher.wait_for("pid ", 4))
    launcher.signal(signal.SIGINT)
    assert launcher.finish()[0] == 130
    assert_gone(everyone)


def test_lost_connection_to_a_host_fails_the_job(launcher: Launcher, ssh: list[str]) -> None:
    launcher.start(*HOSTS, *ssh, source=WAITING)
    everyone = pids(launcher.wait_for("pid ", 4))
    assert launcher.process is not None
    tasks = Path(f"/proc/{launcher.process.pid}/task/{launcher.process.pid}/children").read_text().split()
    clients = [int(pid) for pid in tasks if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ssh\0")]
    assert len(clients) == 2
    os.kill(clients[1], signal.SIGKILL)
    status, _, err = launcher.finish()
    assert status == 1
    assert "rank 3 on 127.0.0.3 was lost: ssh ended with status -9" in err
    assert_gone(everyone)


def test_host_that_cannot_be_reached_is_explained(launcher: Launcher, ssh: list[str]) -> None:
    status, _, err = launcher.run("-H", "localhost:1,127.0.0.9:1", *ssh, source="import time; time.sleep(60)")
    assert status == 1
    assert err.startswith("polyhvdrun: 1 of 2 hosts cannot take part, and nothing was started:\n")
    assert re.search("127.0.0.9  refused  .*Connection refused; is sshd running there", err)


def test_unknown_host_key_is_not_trusted(launcher: Launcher, ssh: list[str], tmp_path: Path) -> None:
    options = [*ssh[:-1], f"UserKnownHostsFile={tmp_path / 'empty'}"]
    status, _, err = launcher.run("-H", "127.0.0.2:1", *options, source="pass")
    assert status == 1
    assert re.search("127.0.0.2  host key  Host key verification failed", err)


def test_python_that_is_absent_on_the_host_is_explained(launcher: Launcher, ssh: list[str]) -> None:
    options = ["--remote-python", "/no/such/python"]
    status, _, err = launcher.run("-H", "127.0.0.2:1", *ssh, *options, source="pass")
    assert status == 1
    assert re.search("127.0.0.2  no Python  .*/no/such/python: .*--remote-python", err)


def test_host_that_does_not_answer_is_given_up(launcher: Launcher, ssh: list[str]) -> None:
    with socket.create_server(("127.0.0.4", 0)) as silent:
        port = silent.getsockname()[1]
        options = ["-p", str(port), "--start-timeout", "1"]
        status, _, err = launcher.run("-H", "127.0.0.4:1", *options, argv=[sys.executable, "-c", "pass"])
    assert status == 1
    assert re.search("127.0.0.4  no answer  no answer within 1 s", err)


def test_host_whose_ssh_leaves_a_process_with_its_output_is_given_up(
    launcher: Launcher, tmp_path: Path
) -> None:
    wrapper = tmp_path / "ssh"
    wrapper.write_text(f"#!/bin/sh\nsleep 600 &\necho $! > {tmp_path}/left\nwait\n")
    wrapper.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    options = ["-H", "localhost:1,127.0.0.4:1", "--start-timeout", "2"]
    try:
        status, _, err = launcher.run(*options, argv=["true"], env={"PATH": path})
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert status == 1
    assert re.search("127.0.0.4  no answer  no answer within 2 s", err)


def test_noise_of_a_login_shell_is_skipped(launcher: Launcher, ssh: list[str], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\necho welcome to this host\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    status, out, err = launcher.run(
        "-H", "127.0.0.2:1", *ssh, "--remote-python", str(python), source="print('fine')"
    )
    assert (status, out) == (0, "[0] fine\n"), err


def test_checkpoint_on_another_host_is_saved_when_every_process_of_this_one_gets_sigterm(
    launcher: Launcher, ssh: list[str]
) -> None:
    source = RANK + (
        "def save(*_): time.sleep(0.5); os.write(1, b'saved %d\\n' % rank); os._exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "os.write(1, b'pid %d\\n' % os.getpid())\n"
        "while True: time.sleep(60)\n"
    )
    launcher.start(*ssh, "-H", "localhost:1,127.0.0.2:1", source=source)
    launcher.wait_for("pid ", 2)
    assert launcher.process is not None
    for pid in [launcher.process.pid, *below(launcher.process.pid)]:  # ssh among them
        os.kill(pid, signal.SIGTERM)
    status, out, _ = launcher.finish()
    assert status == 143
    assert "[0] saved 0" in out
    assert "[1] saved 1" in out
