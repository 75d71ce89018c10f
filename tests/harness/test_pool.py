"""The harness itself: a rank that fails, dies or hangs is never taken for one that passes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import polyhvd.numpy as hvd
import pytest
from pool import MARK, Pool, Pools, PoolSpec, RankFailure
from ranks_alive import is_running, outliving_sigkill, processes_with, wait_until

from polyhvd.testing import worker

SPEC = PoolSpec("numpy", (2,))


@pytest.fixture
def pool(pools: Pools) -> Iterator[Pool]:
    pools.close()
    with Pool(SPEC) as pool:
        yield pool


def give_rank(extra: str) -> tuple[int, int, str]:
    return hvd.rank(), hvd.size(), extra


def test_results_come_in_rank_order(pool: Pool) -> None:
    assert pool.run(give_rank, "x") == [(0, 2, "x"), (1, 2, "x")]
    assert pool.run(give_rank, "y") == [(0, 2, "y"), (1, 2, "y")]


def test_a_run_may_have_no_limit(pool: Pool) -> None:
    assert pool.run(give_rank, "x", deadline_s=float("inf")) == [(0, 2, "x"), (1, 2, "x")]
    pool.start(give_rank, "y")
    assert pool.settle(float("inf"), 1.0, lambda _: True)


def fail_on_the_last() -> None:
    assert hvd.rank() == 0, "the reason"
    hvd.barrier()  # would wait for ever


def test_one_failing_rank_fails_the_run_at_once(pool: Pool) -> None:
    began = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank 1 of numpy 2.*fail_on_the_last.*the reason"):
        pool.run(fail_on_the_last)
    assert time.monotonic() - began < 30
    assert not pool.usable
    assert pool.processes() == []


def wait_for_nobody() -> None:
    if hvd.rank() == 1:
        hvd.barrier()


def test_a_hang_ends_with_every_ranks_stack(pool: Pool) -> None:
    pool.run(give_rank, "x")  # so that this file is imported before the deadline begins
    with pytest.raises(
        RankFailure, match=r"(?s)wait_for_nobody takes more than 1 s.*rank 1 is at:.*in wait_for_nobody"
    ):
        pool.run(wait_for_nobody, deadline_s=1)
    assert pool.processes() == []


def die() -> None:
    if hvd.rank() == 1:
        print("last words", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)


def test_a_rank_that_dies_fails_the_run_with_what_it_printed(pool: Pool) -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1 .*SIGSEGV.*last words"):
        pool.run(die)


def test_a_failed_pool_is_replaced() -> None:
    pools = Pools()
    try:
        first = pools.get(SPEC)
        assert pools.get(SPEC) is first
        with pytest.raises(RankFailure):
            first.run(fail_on_the_last)
        second = pools.get(SPEC)
        assert second is not first
        assert len(second.run(give_rank, "x")) == 2
        assert pools.get(PoolSpec("numpy", (1,))).size == 1
        assert not second.usable, "two pools at a time"
    finally:
        pools.close()


def test_a_pool_that_cannot_start_says_why_each_time() -> None:
    pools = Pools()
    for _ in range(2):
        with pytest.raises(RankFailure, match=r"No module named 'polyhvd\.nothing'"):
            pools.get(PoolSpec("nothing", (1,)))


def exit_badly() -> None:
    import atexit

    atexit.register(os._exit, 7)


def test_a_rank_that_does_not_end_in_good_order_is_noticed(pool: Pool) -> None:
    pool.run(exit_badly)
    with pytest.raises(RankFailure, match="status 7"):
        pool.close()


def test_a_rank_that_outlives_sigkill_does_not_hold_up_its_pool() -> None:
    with Pool(SPEC) as pool, outliving_sigkill(pool.pids[1]):
        began = time.monotonic()
        pool.kill()
        assert time.monotonic() - began < 30
        assert not is_running(pool.pids[0])


def tell_and_wait() -> None:
    worker.note(os.getpid())
    hvd.synchronize(hvd.allreduce_async(__import__("numpy").ones(3), name=f"only {hvd.rank()}"))


def test_ranks_die_with_the_process_that_has_started_them() -> None:
    script = (
        "import os, pool, test_pool\n"
        "p = pool.Pool(test_pool.SPEC)\n"
        "p.start(test_pool.tell_and_wait)\n"
        "print(p.mark, p.note(0), p.note(1), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    output = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, timeout=60)
    mark, *pids = output.stdout.decode().split()
    assert len(pids) == 2, output.stderr.decode()

    def gone() -> bool:  # a process that is about to end has no environment any more
        return not processes_with(MARK, mark) and not any(is_running(int(pid)) for pid in pids)

    wait_until(gone, "the end of the ranks", 30)
