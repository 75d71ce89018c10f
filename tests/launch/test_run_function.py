"""polyhvd.run: a function as a job."""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import polyhvd
from polyhvd import run


def test_results_come_in_rank_order() -> None:
    def square(base: int, *, offset: int) -> tuple[int, int]:
        import os

        rank = int(os.environ["POLYHVD_RANK"])
        return rank, (base + rank) ** 2 + offset

    assert run(square, args=(10,), kwargs={"offset": 1}, np=3) == [(0, 101), (1, 122), (2, 145)]


def test_functions_of_modules_are_found_by_name() -> None:
    assert run(os.path.basename, args=("a/b",), np=1) == ["b"]


def test_failing_rank_raises_here_with_its_traceback() -> None:
    def fail() -> None:
        import os
        import time

        if os.environ["POLYHVD_RANK"] == "1":
            raise ValueError("bad weather")
        time.sleep(600)

    expected = r"rank 1 on localhost exited with status 1\nTraceback .*ValueError: bad weather$"
    with pytest.raises(RuntimeError, match=re.compile(expected, re.DOTALL)):
        run(fail, np=2)


def test_environment_reaches_the_ranks() -> None:
    assert run(os.getenv, args=("MY_SETTING",), np=2, env={"MY_SETTING": "x"}) == ["x", "x"]


def test_large_results_pass() -> None:
    assert [len(part) for part in run(bytes, args=(5_000_000,), np=2)] == [5_000_000] * 2


def test_hosts_may_be_given() -> None:
    assert run(os.getenv, args=("POLYHVD_HOST_ID",), hosts="localhost:1,127.0.0.1:2") == ["0", "1", "1"]


def test_too_few_slots_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 ranks were asked for, but there are 2 slots"):
        run(os.getpid, np=3, hosts="localhost:2")


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
        network_interfaces=["no-such-interface", "lo"],
        executable=sys.executable,
    )
    assert results == [12.0, 13.0, 14.0]  # 2 + 4 + 6, and the rank
    assert (tmp_path / "logs" / "rank.2" / "stdout").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"min_np": 1}, "min_np=1.*no elastic jobs"),
        ({"max_num_proc": 2}, "max_num_proc=2.*no elastic jobs"),
        ({"host_discovery_script": "hosts.sh"}, "host_discovery_script='hosts.sh'.*no elastic jobs"),
        ({"cooldown_range": (1, 2)}, "cooldown_range.*no elastic jobs"),
        ({"use_mpi": True}, "polyhvdrun --mpi"),
        ({"mpi_args": "-v"}, "polyhvdrun --mpi"),
        ({"np": 2, "num_proc": 3}, "they are one argument"),
        ({"hosts": "localhost:1", "hostfile": "x"}, "hosts or hostfile"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(os.getpid, **arguments)
