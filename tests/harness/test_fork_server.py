"""Programs in forks of a server behave as programs of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import fork_servers
import pytest
from fork_servers import ForkServers
from ranks_alive import is_running, wait_until

HERE = Path(__file__).parent
DEADLINE_S = 30.0  # for liveness only


@pytest.fixture(scope="module")
def servers() -> Iterator[ForkServers]:
    servers = ForkServers()
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def python(servers: ForkServers) -> list[str]:
    command = servers.python(2, ["colorsys", "no_such_module"])
    if command == [sys.executable]:
        pytest.skip("this C library has no _Fork")
    return command


def run(
    python: list[str], source: str, *arguments: str, **options: object
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*python, "-c", source, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        **options,  # type: ignore[call-overload]
    )


def start(python: list[str], source: str) -> tuple[subprocess.Popen[str], int]:
    """A program that has begun, and its own pid, which it prints first."""
    begin = "import os, signal, time\nprint(os.getpid(), flush=True)\n"
    process = subprocess.Popen([*python, "-c", begin + source], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, int(process.stdout.readline())


def wait_for_end(pid: int) -> None:
    wait_until(lambda: not is_running(pid), f"the end of process {pid}", DEADLINE_S)


def test_modules_are_there_before_the_program_and_missing_ones_are_its_affair(python: list[str]) -> None:
    source = "import sys; print('colorsys' in sys.modules)\nimport no_such_module"
    done = run(python, source)
    assert done.stdout == "True\n"
    assert done.returncode == 1
    assert "No module named 'no_such_module'" in done.stderr


def test_a_program_has_its_arguments_environment_folder_and_streams(
    python: list[str], tmp_path: Path
) -> None:
    (tmp_path / "beside.py").write_text("name = 'beside'\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, beside\n"
        "assert __name__ == '__main__' and sys.modules['__main__'].beside is beside\n"
        "print(sys.argv, sorted(set(os.environ) - {'LC_CTYPE'}), os.getcwd())\n"
        "print(sys.stdin.read(), beside.name)\n"
        "print('to stderr', file=sys.stderr)\n"
    )
    done = subprocess.run(
        [*python, str(script), "a", "b"],
        cwd=tmp_path,
        env={"ONE": "1", "POLYHVD_RANK": "1"},
        input="from stdin",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    expected = f"{[str(script), 'a', 'b']} ['ONE', 'POLYHVD_RANK'] {tmp_path}\nfrom stdin beside\n"
    assert done.stdout == expected, done.stderr
    assert done.stderr == "to stderr\n"


def test_a_program_has_the_descriptors_that_were_left_open_for_it(python: list[str]) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    run(python, "import os, sys; os.write(int(sys.argv[1]), b'through')", str(writer), close_fds=False)
    os.close(writer)
    assert os.read(reader, 100) == b"through"
    os.close(reader)


def test_a_program_has_a_fault_handler_only_if_its_environment_asks_for_it(python: list[str]) -> None:
    source = "import faulthandler; print(faulthandler.is_enabled())"
    environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
    assert run(python, source, env=environment).stdout == "True\n"
    del environment["PYTHONFAULTHANDLER"]
    assert run(python, source, env=environment).stdout == "False\n"


def test_servers_that_run_no_program_are_closed_when_more_are_needed(tmp_path: Path) -> None:
    servers = ForkServers()
    try:
        modules = ("bisect", "colorsys", "heapq", "queue", "sched", "shelve")[: fork_servers._GROUPS_MAX]
        commands = [servers.python(1, [name]) for name in modules]
        if commands[0] == [sys.executable]:
            pytest.skip("this C library has no _Fork")
        busy, _ = start(commands[0], "time.sleep(600)")
        servers.python(1, ["keyword"])
        assert run(commands[1], "").returncode == 1, "the least recently used one that was idle"
        assert run(commands[2], "").returncode == 0
        assert busy.poll() is None
        busy.kill()
        busy.wait()
        assert run(servers.python(1, ["colorsys"]), "").returncode == 0
    finally:
        servers.close()


def test_handlers_at_exit_run_and_the_exit_status_arrives(python: list[str]) -> None:
    done = run(python, "import atexit, sys; atexit.register(print, 'at exit'); sys.exit(7)")
    assert (done.returncode, done.stdout) == (7, "at exit\n")


def test_a_program_that_dies_of_a_signal_is_told_as_such(python: list[str]) -> None:
    assert run(python, "import os; os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL


def test_signals_are_passed_on(python: list[str]) -> None:
    process, _ = start(
        python, "signal.signal(15, lambda *_: os._exit(3))\nprint('ready', flush=True)\ntime.sleep(600)"
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.terminate()
    assert process.wait(DEADLINE_S) == 3


def test_a_signal_before_the_program_has_been_asked_for_ends_the_proxy(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as first:
        server.bind(str(tmp_path / "0"))
        server.listen(0)
        first.connect(str(tmp_path / "0"))  # the next one waits until this one is accepted
        proxy = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "forked.py"), str(tmp_path), "-c", ""]
        )
        while not has_socket(proxy.pid):
            assert proxy.poll() is None
            time.sleep(0.001)
        proxy.terminate()
        assert proxy.wait(DEADLINE_S) == -signal.SIGTERM


def test_a_signal_that_arrives_with_the_request_is_for_the_program(python: list[str]) -> None:
    values = {"argv": ["-c", "import time; time.sleep(600)"], "cwd": os.getcwd(), "numbers": []}
    request = json.dumps({**values, "environment": dict(os.environ)}).encode()
    with socket.socket(socket.AF_UNIX) as proxy:
        proxy.settimeout(DEADLINE_S)
        proxy.connect(f"{python[-1]}/0")
        proxy.sendall(struct.pack("!I", len(request)) + request + bytes([signal.SIGTERM]))
        assert struct.unpack("!i", proxy.recv(4)) == (-signal.SIGTERM,)


def has_socket(pid: int) -> bool:
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith("socket:"):
                return True
    return False


def test_a_program_and_its_children_end_when_nobody_waits_for_them(python: list[str]) -> None:
    process, pid = start(python, "child = os.fork()\nif child: print(child, flush=True)\ntime.sleep(600)")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    process.kill()
    process.wait()
    wait_for_end(pid)
    wait_for_end(child)


def test_ranks_differ_in_what_is_drawn_for_each_process(python: list[str]) -> None:
    source = "import random; print(hash('text'), random.random())"
    first, again, other = (
        run(python, source, env={**os.environ, "POLYHVD_RANK": rank}).stdout.split() for rank in "001"
    )
    assert first[0] != other[0]
    assert len({first[1], again[1], other[1]}) == 3


def test_a_program_imports_for_itself_where_a_module_starts_threads(
    servers: ForkServers, tmp_path: Path
) -> None:
    source = "import sys, threading; print('threaded' in sys.modules, threading.active_count(), sys.argv)"
    (tmp_path / "threaded.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    python = servers.python(1, ["threaded"], PYTHONPATH=str(tmp_path))
    done = run(python, source, "argument")
    assert done.stdout == "False 1 ['-c', 'argument']\n", done.stderr


def test_servers_and_programs_die_with_the_process_that_has_started_them(tmp_path: Path) -> None:
    source = (
        "import os, subprocess\n"
        "from fork_servers import ForkServers\n"
        "servers = ForkServers()\n"
        "python = servers.python(1, [])\n"
        "code = 'import os, time; print(os.getpid(), os.getppid(), flush=True); time.sleep(600)'\n"
        "process = subprocess.Popen([*python, '-c', code], stdout=subprocess.PIPE)\n"
        "print(process.pid, process.stdout.readline().decode(), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(HERE), "TMPDIR": str(tmp_path)}
    done = run([sys.executable], source, env=environment)
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 3, done.stderr
    for pid in pids:
        wait_for_end(pid)
