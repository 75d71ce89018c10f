"""polyhvd.launch.run: a function as a job."""

from __future__ import annotations

import os
import re

import pytest

from polyhvd.launch import run


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
