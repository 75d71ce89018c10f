"""polyhvd.run: a function as a job."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from launching import pids
from ranks_alive import outliving_sigkill, wait_until

import polyhvd
from polyhvd import run
from polyhvd.launch.job import function, processes
from polyhvd.launch.providers import mpirun
from polyhvd.rendezvous import signed_stream


def test_results_come_in_rank_order() -> None:
    def square(base: int, *, offset: int) -> tuple[int, int]:
        import os

        rank = int(os.environ["POLYHVD_RANK"])
        return rank, (base + rank) ** 2 + offset

    assert run(square, args=(10,), kwargs={"offset": 1}, np=3) == [(0, 101), (1, 122), (2, 145)]


def test_functions_of_modules_are_found_by_name() -> None:
    assert run(os.path.basename, args=("a/b",), np=1) == ["b"]


class BadWeather(ValueError):
    """An error of the user's own, which ranks cannot import: it travels by value."""


class Picky(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


cloudpickle.register_pickle_by_value(sys.modules[__name__])


def fail_on_rank_1(make: Callable[[], BaseException]) -> None:
    import os
    import time

    if os.environ["POLYHVD_RANK"] == "1":
        raise make()
    time.sleep(600)


def test_exception_of_a_rank_is_raised_here_with_the_remote_traceback() -> None:
    with pytest.raises(BadWeather) as caught:
        run(fail_on_rank_1, (lambda: BadWeather("bad weather", 3),), np=2)
    assert caught.value.args == ("bad weather", 3)
    expected = r"rank 1 on localhost exited with status 1\nTraceback .*BadWeather: \('bad weather', 3\)$"
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert re.search(expected, str(caught.value.__cause__), re.DOTALL)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Picky(1, 2), r"Picky: 1\n\(its exception cannot be raised here: TypeError: .*'two'\)$"),
        (lambda: ValueError(threading.Lock()), r"\(its exception cannot be sent: TypeError: cannot pickle"),
        (lambda: SystemExit(3), "rank 1 on localhost exited with status 3$"),
        (lambda: KeyboardInterrupt(), "rank 1 on localhost .*KeyboardInterrupt$"),
    ],
)
def test_what_cannot_be_raised_here_is_a_runtime_error(
    make: Callable[[], BaseException], message: str
) -> None:
    with pytest.raises(RuntimeError, match=re.compile(message, re.DOTALL)):
        run(fail_on_rank_1, (make,), np=2)


def test_a_result_that_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match=r"rank 0: a result of type lock cannot be sent to polyhvd\.run"):
        run(threading.Lock, np=1)
    with pytest.raises(RuntimeError, match="no result of rank 0: the function has ended the process"):
        run(os._exit, (0,), np=1)


def test_output_goes_through_sys_stdout_as_it_comes() -> None:
    def say() -> None:
        print("hello")
        print("dear", file=sys.stderr)

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        run(say, np=1)
    assert (out.getvalue(), err.getvalue()) == ("[0] hello\n", "[0] dear\n")


def test_ctrl_c_ends_the_ranks_and_returns_control() -> None:
    program = (
        "import os, signal, time, polyhvd\n"
        "def wait():\n"
        "    os.write(1, b'pid %d\\n' % os.getpid())\n"
        "    time.sleep(600)\n"
        "print('first')\n"
        "try:\n"
        "    polyhvd.run(wait, np=2)\n"
        "except KeyboardInterrupt:\n"
        "    print('interrupted', flush=True)\n"
        "print(polyhvd.run(lambda: 'again', np=1), signal.getsignal(2) is signal.default_int_handler)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout is not None
    seen = b""
    while len(pids(seen)) < 2:
        line = child.stdout.readline()
        assert line, child.communicate()
        seen += line
    assert seen.startswith(b"first\n")
    child.send_signal(signal.SIGINT)
    rest, _ = child.communicate(timeout=30)
    assert rest.decode().splitlines()[-2:] == ["interrupted", "['again'] True"]
    assert not [pid for pid in pids(seen) if os.path.exists(f"/proc/{pid}")]


def test_handler_of_faulthandler_is_still_there_after_a_job(tmp_path: Path) -> None:
    program = (
        "import faulthandler, os, signal, sys, polyhvd\n"
        "faulthandler.register(signal.SIGUSR1, file=open(sys.argv[1], 'w'))\n"
        "polyhvd.run(os.getpid, np=1)\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "dump"], timeout=60, check=True)
    assert "most recent call first" in (tmp_path / "dump").read_text()


def test_environment_reaches_the_ranks() -> None:
    assert run(os.getenv, args=("MY_SETTING",), np=2, env={"MY_SETTING": "x"}) == ["x", "x"]


def test_large_results_pass() -> None:
    assert [len(part) for part in run(bytes, args=(5_000_000,), np=2)] == [5_000_000] * 2


def test_all_results_together_may_be_larger_than_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signed_stream, "_BODY_BYTES_MAX", 1 << 20)
    assert [len(part) for part in run(bytes, args=(700_000,), np=2)] == [700_000] * 2


def test_a_function_or_a_result_that_is_too_large_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def large() -> bytes:
        sys.modules["__main__"].VALUE_BYTES_MAX = 1000  # type: ignore[attr-defined]
        return bytes(2000)

    with pytest.raises(
        ValueError, match=r"rank 0: the result has 20\d\d bytes when pickled, and at most 1000"
    ):
        run(large, np=1)
    monkeypatch.setattr(function, "VALUE_BYTES_MAX", 1000)
    with pytest.raises(ValueError, match=r"run\(\): the function with its arguments has 20\d\d bytes"):
        run(len, args=(bytes(2000),), np=1)


def test_hosts_may_be_given() -> None:
    assert run(os.getenv, args=("POLYHVD_HOST_ID",), hosts="localhost:1,127.0.0.1:2") == ["0", "1", "1"]


def test_too_few_slots_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 ranks were requested, but there are 2 slots"):
        run(os.getpid, np=3, hosts="localhost:2")


def make_mpirun(
    folder: Path, job: str, monkeypatch: pytest.MonkeyPatch, *, version: str = "echo HYDRA build details"
) -> None:
    """Have ``mpirun`` run one shell script, and ``mpirun --version`` another."""
    launcher = folder / "mpirun"
    launcher.write_text(f'#!/bin/sh\nif [ "$1" = --version ]; then {version}; exit; fi\n{job}\n')
    launcher.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(folder / "python"))  # beside it


def test_a_launcher_of_mpi_that_does_not_report_its_version_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_mpirun(tmp_path, "", monkeypatch, version="exec sleep 600")
    monkeypatch.setattr(mpirun, "_VERSION_TIMEOUT_S", 0.5)
    with pytest.raises(ValueError, match=r"mpirun --version has not ended within 0\.5 s"):
        run(os.getpid, np=1, use_mpi=True)


def test_a_process_that_outlives_the_launcher_of_mpi_does_not_hold_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_mpirun(
        tmp_path,
        f"sh -c 'while :; do echo left; sleep 0.1; done' & echo $! > {tmp_path}/left\necho last; exit 3",
        monkeypatch,
    )
    failures: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    out, threads, begun = io.StringIO(), set(threading.enumerate()), time.monotonic()
    try:
        with contextlib.redirect_stdout(out), pytest.raises(RuntimeError, match="ended with status 3"):
            run(os.getpid, np=1, use_mpi=True)
        assert time.monotonic() - begun < 30
        for thread in set(threading.enumerate()) - threads:
            thread.join(30)  # of the output, which is closed
            assert not thread.is_alive()
    finally:
        os.kill(int((tmp_path / "left").read_text()), signal.SIGKILL)
    assert "last\n" in out.getvalue()
    assert not failures


def test_an_exception_leaves_a_launcher_of_mpi_behind_that_outlives_sigkill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = tmp_path / "pid"
    make_mpirun(tmp_path, f"echo $$ > {pid}.new; mv {pid}.new {pid}; exec sleep 600", monkeypatch)
    monkeypatch.setattr(processes, "_KILLED_S", 0.2)
    done = threading.Event()

    def interrupt() -> bool:
        wait_until(pid.exists, "the launcher of MPI runs")
        with outliving_sigkill(int(pid.read_text())):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            return done.wait(30)

    def fail(*_: object) -> None:
        raise RuntimeError("from a handler")

    former = signal.signal(signal.SIGUSR1, fail)
    try:
        with ThreadPoolExecutor(1) as threads:
            interrupted = threads.submit(interrupt)
            with pytest.raises(RuntimeError, match="from a handler"):
                run(os.getpid, np=1, use_mpi=True, term_grace_s=0.1)
            done.set()
            assert interrupted.result()
    finally:
        signal.signal(signal.SIGUSR1, former)
    assert re.search(
        r"mpirun \(process \d+\) has not ended within 0\.2 s of SIGKILL", capsys.readouterr().err
    )


def test_running_from_a_thread_works() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, os.getenv, ("POLYHVD_RANK",), np=2).result(60) == ["0", "1"]


def test_nothing_is_left_open_after_a_run() -> None:
    run(os.getpid, np=1)
    before = len(os.listdir("/proc/self/fd"))
    run(os.getpid, np=1)
    assert len(os.listdir("/proc/self/fd")) == before


#: Of horovod.run 0.28.1, in their order.
HOROVOD_S = """
    func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile
    host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose
    use_gloo use_mpi mpi_args network_interface network_interfaces executable np min_np max_np
"""


def test_arguments_are_those_of_horovod() -> None:
    names = HOROVOD_S.split()
    parameters = inspect.signature(polyhvd.run).parameters
    assert list(parameters)[: len(names)] == names
    assert all(parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for name in names)


def test_run_is_where_horovod_has_it() -> None:
    from polyhvd import runner

    assert runner.run is polyhvd.run


def test_what_horovod_takes_is_taken(tmp_path: Path) -> None:
    def collect(base: float) -> float:
        import numpy
        import polyhvd.numpy as hvd

        hvd.init()
        return float(hvd.allreduce(numpy.array([base * (1 + hvd.rank())]), op=hvd.Sum)[0]) + hvd.rank()

    hostfile = tmp_path / "hosts"
    hostfile.write_text("localhost slots=2\n127.0.0.1 slots=1\n")
    results = run(
        collect,
        (2.0,),
        num_proc=3,
        hostfile=str(hostfile),
        start_timeout=60,
        ssh_port=22,
        disable_cache=True,
        output_filename=str(tmp_path / "logs"),
        verbose=0,
        use_gloo=True,
        min_np=3,
        max_num_proc=3,
        network_interfaces=["no-such-interface", "lo"],
        executable=sys.executable,
    )
    assert results == [12.0, 13.0, 14.0]  # 2 + 4 + 6, and the rank
    assert (tmp_path / "logs" / "rank.2" / "stdout").exists()


def test_an_elastic_run_returns_the_results_of_its_last_world_in_rank_order() -> None:
    def train() -> tuple[int, int, int]:
        import os
        import signal

        import polyhvd.numpy as hvd

        hvd.init()
        state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, step=0)

        @hvd.elastic.run
        def loop(state):  # type: ignore[no-untyped-def]
            while state.step < 3:
                state.step += 1
                state.commit()
                if state.step == 2 and hvd.size() == 3 and hvd.rank() == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                hvd.barrier()

        loop(state)
        return hvd.rank(), hvd.size(), int(os.environ["POLYHVD_MEMBER"])

    assert run(train, np=3, min_np=2, max_np=3, reset_limit=5, cooldown_range=(600, 600)) == [
        (0, 2, 0),
        (1, 2, 2),
    ]


def test_hosts_of_an_elastic_run_come_from_a_script(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    script.write_text("#!/bin/sh\necho localhost\n")
    script.chmod(0o755)

    def size() -> int:
        import polyhvd.numpy as hvd

        hvd.init()
        return hvd.size()

    assert run(size, np=2, min_np=2, slots=2, host_discovery_script=str(script)) == [2, 2]


def test_an_elastic_run_keeps_results_of_processes_that_have_not_called_init() -> None:
    def first_is_killed() -> str:
        if os.environ["POLYHVD_MEMBER"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return os.environ["POLYHVD_MEMBER"]

    assert run(first_is_killed, np=2, min_np=1, cooldown_range=(600, 600)) == ["1"]
    with pytest.raises(RuntimeError, match=r"returned on 1 processes without .* fewer than min_np=2"):
        run(first_is_killed, np=2, min_np=2, cooldown_range=(600, 600))


def test_an_exception_of_an_elastic_run_is_raised_here() -> None:
    def fail() -> None:
        raise BadWeather("rain")

    with pytest.raises(BadWeather, match="rain"):
        run(fail, np=2, min_np=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_np": 1, "min_num_proc": 2}, "they are one argument"),
        ({"min_np": 3, "hosts": "localhost:2"}, "--min-np 3: the hosts have 2 slots"),
        ({"max_np": 2}, "needs -np or --min-np"),
        ({"host_discovery_script": "x", "hosts": "a"}, "leave out -H and --hostfile"),
        ({"use_mpi": True, "use_gloo": True}, "use_mpi and mpi_args exclude use_gloo"),
        ({"mpi_args": "-v", "output_filename": "x"}, "use_mpi and mpi_args exclude output_filename"),
        ({"use_mpi": True, "np": 2, "min_np": 1}, "not for elastic jobs"),
        ({"np": 2, "num_proc": 3}, "they are one argument"),
        ({"hosts": "localhost:1", "hostfile": "x"}, "hosts or hostfile"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(os.getpid, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"func": 5}, r"run\(\): func must be a function; found 5"),
        ({"args": 5}, r"run\(\): args must be a tuple or a list; found 5"),
        ({"args": "ab"}, r"run\(\): args must be a tuple or a list; found 'ab'"),
        ({"kwargs": [1]}, r"run\(\): kwargs must be a dict; found \[1\]"),
        ({"np": "2"}, r"run\(\): np must be a whole number; found '2'"),
        ({"np": 2.0}, r"run\(\): np must be a whole number; found 2.0"),
        ({"env": {"A": 1}}, r"run\(\): env must have texts; found 'A': 1"),
        (
            {"args": (threading.Lock(),)},
            r"run\(\): getpid and its arguments cannot be sent to the ranks: TypeErr",
        ),
    ],
)
def test_a_call_of_other_types_is_refused_before_anything_starts(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        run(**{"func": os.getpid, **arguments})
