"""polyhvdrun with real processes: output, exit statuses, who is to blame, and that nothing is left."""

from __future__ import annotations

import fcntl
import os
import re
import resource
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from launching import FAMILY, RANK, ROOT, WAITING, Launcher, assert_gone, pids, wait_until

from polyhvd.launch.job.spec import JobSpec


def test_every_line_carries_its_rank(launcher: Launcher) -> None:
    status, out, err = launcher.run(
        "-np", "3", source=RANK + "print('to out', rank); print('to err', rank, file=sys.stderr)"
    )
    assert status == 0
    assert sorted(out.splitlines()) == [f"[{r}] to out {r}" for r in range(3)]
    assert sorted(err.splitlines()) == [f"[{r}] to err {r}" for r in range(3)]


def test_no_tag_leaves_lines_as_they_are(launcher: Launcher) -> None:
    assert launcher.run("-np", "1", "--no-tag", source="print('plain')") == (0, "plain\n", "")


def test_lines_written_in_pieces_by_several_ranks_are_not_mixed(launcher: Launcher) -> None:
    source = RANK + (
        "for i in range(200):\n"
        "  for part in (str(rank) * 40, ' ', str(i), '\\n'): print(part, end='', flush=True)\n"
    )
    status, out, _ = launcher.run("-np", "3", source=source)
    assert status == 0
    lines = out.splitlines()
    assert len(lines) == 600
    for rank in range(3):
        own = [line for line in lines if line.startswith(f"[{rank}] ")]
        assert own == [f"[{rank}] {str(rank) * 40} {i}" for i in range(200)]


def test_bytes_that_are_no_text_pass_unchanged(launcher: Launcher) -> None:
    launcher.start("-np", "1", source="import sys; sys.stdout.buffer.write(b'\\xff\\xfe\\x00 \\xe4\\n')")
    assert launcher.process is not None
    out, _ = launcher.process.communicate(timeout=30)
    assert out == b"[0] \xff\xfe\x00 \xe4\n"


def test_last_line_without_newline_is_printed(launcher: Launcher) -> None:
    assert launcher.run("-np", "1", source="print('end', end='')")[1] == "[0] end\n"


def test_output_is_complete_when_ranks_write_much_and_exit(launcher: Launcher) -> None:
    source = RANK + "sys.stdout.write('\\n'.join(str(i) for i in range(50000)) + '\\n')"
    status, out, _ = launcher.run("-np", "2", source=source)
    assert status == 0
    assert len(out.splitlines()) == 100000


def test_closed_output_does_not_end_the_job(launcher: Launcher, tmp_path: Path) -> None:
    done = tmp_path / "done"
    source = RANK + f"for i in range(20000): print('x' * 100)\nopen({str(done)!r}, 'w').close()\n"
    launcher.start("-np", "1", source=source)
    assert launcher.process is not None
    assert launcher.process.stdout is not None
    launcher.process.stdout.close()
    assert launcher.process.wait(30) == 0
    assert done.exists()


def test_output_directory_holds_each_rank_unchanged(launcher: Launcher, tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    source = RANK + "print('out', rank); print('err', rank, file=sys.stderr)"
    assert launcher.run("-np", "2", "--output-filename", str(folder), source=source)[0] == 0
    for rank in range(2):
        assert (folder / f"rank.{rank}" / "stdout").read_text() == f"out {rank}\n"
        assert (folder / f"rank.{rank}" / "stderr").read_text() == f"err {rank}\n"


def test_ranks_know_their_places(launcher: Launcher) -> None:
    source = (
        "import os\n"
        "names = ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE')\n"
        "print(*(os.environ[f'{p}_{n}'] for p in ('POLYHVD', 'HOROVOD') for n in names), end=' ')\n"
        "print(os.environ['POLYHVD_HOST_ID'])\n"
    )
    status, out, _ = launcher.run("-H", "localhost:2,127.0.0.1:1", source=source)
    assert status == 0
    expected = {0: "0 3 0 2 0 2", 1: "1 3 1 2 0 1", 2: "2 3 0 1 1 2"}
    hosts = {0: 0, 1: 0, 2: 1}
    assert sorted(out.splitlines()) == [f"[{r}] {expected[r]} {expected[r]} {hosts[r]}" for r in range(3)]


def test_ranks_that_a_rank_of_an_elastic_job_starts_are_not_its_members(launcher: Launcher) -> None:
    inner = [sys.executable, "-m", "polyhvd.launch", "-np", "2", "env"]
    status, out, err = launcher.run("-np", "1", "--min-np", "1", argv=inner)
    assert status == 0, err
    assert "POLYHVD_SIZE=2" in out
    assert "POLYHVD_MEMBER" not in out
    assert "POLYHVD_LAUNCHER_TIMEOUT_S" not in out
    order = JobSpec(["env"], [], []).order([], {"POLYHVD_MEMBER": "0", "HOME": "/"}, {})
    assert order["env"] == {"HOME": "/", "PYTHONUNBUFFERED": "1"}  # forwarded to other hosts


def test_threads_are_divided_among_ranks(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    source = "import os; print(os.environ['OMP_NUM_THREADS'], os.environ['PYTHONUNBUFFERED'])"
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    _, out, _ = launcher.run("-np", "2", source=source)
    assert sorted(out.splitlines()) == [f"[{rank}] {threads} 1" for rank in range(2)]


def test_threads_that_the_user_chose_stay(launcher: Launcher) -> None:
    source = "import os; print(os.environ['OMP_NUM_THREADS'])"
    assert launcher.run("-np", "1", source=source, env={"OMP_NUM_THREADS": "7"})[1] == "[0] 7\n"


def test_secret_is_on_no_command_line(launcher: Launcher) -> None:
    source = (
        RANK
        + "import glob\nsecret = os.environ['POLYHVD_SECRET'].encode()\nassert len(secret) >= 32\n"
        + (
            "def read(path):\n"
            "  try: return open(path, 'rb').read()\n"
            "  except OSError: return b''\n"
            "print(any(secret in read(p) for p in glob.glob('/proc/[0-9]*/cmdline')))"
        )
    )
    assert launcher.run("-np", "1", source=source)[1] == "[0] False\n"


def test_failing_rank_gives_its_status_and_its_traceback_comes_last(launcher: Launcher) -> None:
    source = RANK + "if rank == 1: raise ValueError('bad weather')\nwhile True: time.sleep(60)"
    status, _, err = launcher.run("-np", "3", source=source)
    assert status == 1
    assert "polyhvdrun: rank 1 on localhost exited with status 1" in err
    assert err.splitlines()[-1] == "[1] ValueError: bad weather"
    assert (
        err.splitlines()[err.splitlines().index("polyhvdrun: rank 1 on localhost exited with status 1") + 1]
        == "[1] Traceback (most recent call last):"
    )


def test_exit_status_is_passed_on(launcher: Launcher) -> None:
    status, _, err = launcher.run("-np", "2", source=RANK + "sys.exit(3 if rank else 0)")
    assert status == 3
    assert err.splitlines()[-1] == "polyhvdrun: rank 1 on localhost exited with status 3"


def test_killed_rank_is_named_with_its_signal(launcher: Launcher) -> None:
    source = RANK + "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\nwhile True: time.sleep(60)"
    status, _, err = launcher.run("-np", "3", source=source)
    assert status == 128 + signal.SIGKILL
    assert err.splitlines()[-1] == "polyhvdrun: rank 2 on localhost was killed by SIGKILL"


@pytest.mark.parametrize("error", ["PeerLostError", "HorovodInternalError"])
def test_first_cause_is_blamed_although_its_victims_exit_before(
    launcher: Launcher, tmp_path: Path, error: str
) -> None:
    # Rank 2 waits until both victims are gone, then dies of its own cause.
    source = RANK + (
        f"class {error}(RuntimeError): pass\n"
        f"folder = {str(tmp_path)!r}\n"
        "if rank != 2:\n"
        "  open(f'{folder}/{rank}', 'w').write(str(os.getpid()))\n"
        f"  raise {error}('lost rank 2')\n"
        "def gone(r):\n"
        "  if not os.path.exists(f'{folder}/{r}'): return False\n"
        "  pid = open(f'{folder}/{r}').read()\n"
        "  return bool(pid) and not os.path.exists(f'/proc/{pid}/exe')\n"
        "while not (gone(0) and gone(1)): time.sleep(0.001)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    status, _, err = launcher.run("-np", "3", source=source)
    assert "rank 2 on localhost was killed by SIGKILL" in err.splitlines()[-1]
    assert status == 137


def test_victim_is_reported_when_there_is_no_other_cause(launcher: Launcher) -> None:
    source = RANK + (
        "class PeerLostError(RuntimeError): pass\n"
        "if rank: raise PeerLostError('rank 0 is gone')\n"
        "while True: time.sleep(60)"
    )
    status, _, err = launcher.run("-np", "2", source=source)
    assert status == 1
    assert err.splitlines()[-1].endswith("PeerLostError: rank 0 is gone")


def test_rank_that_ignores_sigterm_is_killed(launcher: Launcher) -> None:
    source = RANK + (
        "if rank == 0:\n"
        "  signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "  print('pid', os.getpid(), flush=True)\n"
        "  while True: time.sleep(60)\n"
        "sys.exit(5)\n"
    )
    status, out, _ = launcher.run("-np", "2", "--term-grace-s", "0.5", source=source)
    assert status == 5
    assert_gone(pids(out.encode()))


def test_sigterm_lets_a_rank_clean_up_after_another_failed(launcher: Launcher, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    source = RANK + (
        f"ready = {str(ready)!r}\n"
        "if rank == 0:\n"
        "  signal.signal(signal.SIGTERM, lambda *_: sys.exit('saved'))\n"
        "  open(ready, 'w').close()\n"
        "  while True: time.sleep(60)\n"
        "while not os.path.exists(ready): time.sleep(0.001)\n"
        "sys.exit(5)\n"
    )
    status, _, err = launcher.run("-np", "2", source=source)
    assert status == 5
    assert "[0] saved" in err


def test_command_that_does_not_exist_is_explained(launcher: Launcher) -> None:
    status, _, err = launcher.run("-np", "2", argv=["/no/such/program"])
    assert status == 127
    assert "cannot run '/no/such/program': No such file or directory" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-np", "5", "-H", "localhost:2"], "5 ranks were requested, but there are 2 slots (localhost:2)"),
        (["-np", "0"], "cannot start 0 ranks"),
        (["-H", "a:x"], "'x' is not a number of slots"),
        (["-H", "-oProxyCommand=x:1"], "expected one argument"),
        (["--hosts=-oProxyCommand=x:1"], "is not a host name"),
        (["--start-timeout", "-1"], "must be above 0"),
        (["--term-grace-s", "-1"], "--term-grace-s -1: must not be negative"),
        (["--term-grace-s", "nan"], "--term-grace-s nan: must not be negative"),
    ],
)
def test_wrong_options_are_explained(launcher: Launcher, options: list[str], message: str) -> None:
    status, _, err = launcher.run(*options, argv=["true"])
    assert status == 2
    assert message in err


def test_missing_command_is_a_usage_error(launcher: Launcher) -> None:
    status, _, err = launcher.run("-np", "2", argv=[])
    assert status == 2
    assert "no command to run" in err


def test_options_of_the_command_are_its_own(launcher: Launcher) -> None:
    argv = [sys.executable, "-c", "import sys; print(sys.argv[1:])", "-np", "9", "--version"]
    assert launcher.run("-np", "1", argv=argv) == (0, "[0] ['-np', '9', '--version']\n", "")


def test_ctrl_c_interrupts_all_ranks_and_gives_130(launcher: Launcher) -> None:
    source = RANK + (
        "try:\n"
        "  print('pid', os.getpid(), flush=True)\n"
        "  while True: time.sleep(60)\n"
        "except KeyboardInterrupt: print('interrupted', rank)\n"
    )
    launcher.start("-np", "2", source=source)
    ranks = pids(launcher.wait_for("pid ", 2))
    launcher.signal(signal.SIGINT)
    status, out, _ = launcher.finish()
    assert status == 130
    assert "[0] interrupted 0" in out
    assert "[1] interrupted 1" in out
    assert_gone(ranks)


def test_ctrl_c_of_a_terminal_reaches_each_rank_once(launcher: Launcher) -> None:
    # A terminal signals its whole foreground group, not the launcher alone.
    source = RANK + (
        "signal.signal(signal.SIGINT, lambda *_: (print('interrupted'), sys.exit()))\n"
        "os.write(1, b'pid %d\\n' % os.getpid())\n"
        "while True: time.sleep(60)\n"
    )
    launcher.start("-np", "2", source=source, session=True)
    ranks = pids(launcher.wait_for("pid ", 2))
    assert launcher.process is not None
    os.killpg(launcher.process.pid, signal.SIGINT)
    status, out, _ = launcher.finish()
    assert status == 130
    assert out.count("interrupted") == 2
    assert_gone(ranks)


def test_ctrl_c_reaches_a_program_behind_a_shell(launcher: Launcher) -> None:
    source = RANK + (
        "try:\n"
        "  os.write(1, b'pid %d\\n' % os.getpid())\n"
        "  while True: time.sleep(60)\n"
        "except KeyboardInterrupt: print('interrupted')\n"
    )
    launcher.start(
        "-np", "1", argv=["sh", "-c", f"trap : INT; {sys.executable} {launcher.script(source)}; true"]
    )
    ranks = pids(launcher.wait_for("pid ", 1))
    launcher.signal(signal.SIGINT)
    status, out, _ = launcher.finish()
    assert status == 130
    assert "[0] interrupted" in out
    assert_gone(ranks)


def test_second_ctrl_c_kills_ranks_that_do_not_listen(launcher: Launcher) -> None:
    source = RANK + (
        "seen = []\n"
        "signal.signal(signal.SIGINT, lambda *_: print('ignored', flush=True))\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('pid', os.getpid(), flush=True)\n"
        "while True: time.sleep(60)\n"
    )
    launcher.start("-np", "2", source=source)
    ranks = pids(launcher.wait_for("pid ", 2))
    launcher.signal(signal.SIGINT)
    launcher.wait_for("ignored", 2)
    launcher.signal(signal.SIGINT)
    assert launcher.finish()[0] == 130
    assert_gone(ranks)


def test_sigterm_ends_the_ranks_and_gives_143(launcher: Launcher) -> None:
    launcher.start("-np", "2", source=WAITING)
    ranks = pids(launcher.wait_for("pid ", 2))
    launcher.signal(signal.SIGTERM)
    assert launcher.finish()[0] == 143
    assert_gone(ranks)


def test_kill_9_of_the_launcher_leaves_no_process(launcher: Launcher) -> None:
    launcher.start("-np", "2", source=FAMILY + WAITING)
    everyone = pids(launcher.wait_for("pid ", 6))
    launcher.signal(signal.SIGKILL)
    assert_gone(everyone)


def test_kill_9_of_the_agent_leaves_no_rank_and_fails_the_job(launcher: Launcher) -> None:
    launcher.start("-np", "2", source=WAITING)
    ranks = pids(launcher.wait_for("pid ", 2))
    agent = int(Path(f"/proc/{ranks[0]}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(agent, signal.SIGKILL)
    status, _, err = launcher.finish()
    assert status == 1
    assert "rank 0 on localhost was lost: the agent ended with status -9" in err
    assert_gone(ranks)


def test_children_of_ranks_die_with_the_job(launcher: Launcher, tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    source = FAMILY + f"while not os.path.exists({str(flag)!r}): time.sleep(0.001)\n"
    launcher.start("-np", "1", source=source)
    everyone = pids(launcher.wait_for("pid ", 2))
    flag.touch()
    assert launcher.finish()[0] == 0
    assert_gone(everyone)


def test_verbose_names_hosts_and_processes(launcher: Launcher) -> None:
    status, _, err = launcher.run("-v", "-np", "2", source="pass")
    assert status == 0
    assert "rendezvous at 127.0.0.1:" in err
    assert len(re.findall(r"rank \d is pid \d+ on localhost", err)) == 2


def test_version_is_printed() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "polyhvd.launch", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0
    assert result.stdout.startswith("polyhvd ")


def test_host_file_assigns_slots(launcher: Launcher, tmp_path: Path) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("# two\nlocalhost slots=1\n127.0.0.1 slots=2  # and more\n")
    status, out, _ = launcher.run(
        "--hostfile", str(hostfile), source="import os; print(os.environ['POLYHVD_HOST_ID'])"
    )
    assert status == 0
    assert sorted(out.splitlines()) == ["[0] 0", "[1] 1", "[2] 1"]


#: Prints without end.
ENDLESS = RANK + "os.write(1, b'pid %d\\n' % os.getpid())\nwhile True: print('x' * 1000)\n"


def test_second_signal_ends_a_job_whose_output_nobody_reads(launcher: Launcher) -> None:
    stubborn = "for number in (2, 15): signal.signal(number, signal.SIG_IGN)\n"
    launcher.start("-np", "2", source=RANK + stubborn + ENDLESS)
    ranks = pids(launcher.wait_for("pid ", 2))
    process = launcher.process
    assert process is not None
    wait_until(lambda: unread_bytes(process) > 32768, "a pipe about as full as it gets")
    for _ in range(2):
        launcher.signal(signal.SIGINT)
        wait_until(lambda: not has_pending_signal(process.pid), "the signal's arrival")
    assert process.wait(30) == 130
    assert_gone(ranks)


def test_first_signal_stops_ranks_whose_output_nobody_reads(launcher: Launcher) -> None:
    launcher.start("-np", "2", source=ENDLESS)
    ranks = pids(launcher.wait_for("pid ", 2))
    process = launcher.process
    assert process is not None
    wait_until(lambda: unread_bytes(process) > 32768, "a pipe about as full as it gets")
    launcher.signal(signal.SIGINT)
    assert_gone(ranks)
    assert launcher.finish()[0] == 130


def unread_bytes(process: subprocess.Popen[bytes]) -> int:
    """How much of a process's standard output waits in its pipe."""
    assert process.stdout is not None
    return int.from_bytes(fcntl.ioctl(process.stdout, termios.FIONREAD, b"\0" * 4), sys.byteorder)


def has_pending_signal(pid: int) -> bool:
    """Whether a signal has been sent to a process but not delivered."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return any(int(bits, 16) for bits in re.findall(r"(?:Sig|Shd)Pnd:\s+(\w+)", status))


def test_starting_a_job_takes_little_more_than_its_interpreters() -> None:
    """0.13 s of processors. How long that takes depends on what else there is: `make bench` measures it."""
    nothing = [sys.executable, "-c", "pass"]

    def used_s(*commands: list[str]) -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for process in [subprocess.Popen(command, cwd=ROOT) for command in commands]:
            assert process.wait() == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    job = [sys.executable, "-m", "polyhvd.launch", "-np", "2", *nothing]
    used_s(job)  # compiles modules
    assert used_s(job) - used_s(nothing, nothing) < 0.6


def test_all_survivors_of_a_killed_rank_write_flight_dumps_where_they_are_not_stopped(
    launcher: Launcher, tmp_path: Path
) -> None:
    source = (
        "import os\nimport numpy as np\nimport polyhvd.numpy as hvd\nhvd.init()\nhvd.barrier()\n"
        "if hvd.rank() == 1: os.kill(os.getpid(), 9)\nhvd.allreduce(np.ones(3))\n"
    )
    assert launcher.run("-np", "3", "--keep-going", source=source)[0] == 137
    dumps = sorted(path.name.split(".")[1] for path in tmp_path.glob("polyhvd-flight.*.json"))
    assert dumps == ["rank0", "rank2"]
