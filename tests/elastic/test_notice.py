"""A number for the program of every rank, as an entry in the total order of decisions."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import polyhvd.numpy as hvd
import pytest

from polyhvd.runtime import current

everywhere = pytest.mark.ranks(1, 3, framework="numpy")


@everywhere
def test_notice_is_seen_by_all_ranks_after_the_same_operation() -> None:
    engine = current.world().engine
    assert engine.notice == 0
    seen = []
    for step in range(200):
        if hvd.rank() == 0 and step == 100:
            engine.notify(1)
        hvd.allreduce(np.ones(3), name="x")
        seen.append(engine.notice)
    assert seen == sorted(seen)
    assert seen[99] == 0
    assert seen[-1] == 1
    assert hvd.allgather_object(seen) == hvd.size() * [seen]


@everywhere
def test_notice_that_has_come_is_not_seen_before_the_next_operation() -> None:
    engine = current.world().engine
    before = engine.notice
    if hvd.rank() == 0:
        engine.notify(before + 1)
    assert engine.notice == before
    hvd.barrier()
    hvd.barrier()
    assert engine.notice == before + 1


@everywhere
def test_notice_is_not_seen_before_it_is_waited_for() -> None:
    """What runs in the background ends on some ranks before others have looked."""
    engine = current.world().engine
    before = engine.notice
    if hvd.rank() == 0:
        engine.notify(before + 1)
    for number in range(3):
        handle = hvd.allreduce_async(np.ones(3), name=f"background {number}")
        while not hvd.poll(handle):
            time.sleep(0.001)
    assert engine.notice == before
    hvd.synchronize(handle)
    assert engine.notice == before + 1


@everywhere
def test_later_tuning_takes_no_notice_back() -> None:
    engine = current.world().engine
    before = engine.notice
    if hvd.rank() == 0:
        tuning = engine.tuning
        engine.notify(before + 1)
        engine.tune(tuning)
        engine.notify(before)
    hvd.barrier()
    hvd.barrier()
    assert engine.notice == before + 1
    assert hvd.allgather_object(engine.tuning == engine.tuning) == hvd.size() * [True]


@everywhere
def test_only_rank_0_notifies() -> None:
    if hvd.rank() > 0:
        with pytest.raises(hvd.InvalidArgumentError, match=r"notify\(\): only rank 0 may call it"):
            current.world().engine.notify(1)
    hvd.barrier()


def reduce_for_ever(x: np.ndarray, reduced: threading.Event) -> None:
    while True:
        hvd.allreduce(x, name="x")
        reduced.set()


def is_in_state(states: str, task: Path) -> bool:
    """Return whether a thread is in one of these states of /proc: "T" if it is stopped, "S" if it waits."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0] in states


@pytest.mark.ranks(2, framework="numpy", fresh=True)
def test_abort_ends_a_transfer_that_does_not_move() -> None:
    """The report of another rank's loss must reach the program during a transfer, too."""
    pids = hvd.allgather_object(os.getpid())
    x = np.ones(1 << 20)
    reduced = threading.Event()
    stopped_at: list[float] = []
    main = Path(f"/proc/self/task/{threading.get_native_id()}")

    def stop_the_other() -> None:
        reduced.wait()
        os.kill(pids[1], signal.SIGSTOP)
        tasks = list(Path(f"/proc/{pids[1]}/task").iterdir())
        while not all(is_in_state("Tt", task) for task in tasks):  # one may be about to send
            time.sleep(0.001)
        while not is_in_state("S", main):
            time.sleep(0.001)
        stopped_at.append(time.monotonic())
        current.world().engine.abort("a test")

    if hvd.rank() == 0:
        threading.Thread(target=stop_the_other).start()
    try:
        with pytest.raises(hvd.PeerLostError, match="a test"):
            reduce_for_ever(x, reduced)
        if hvd.rank() == 0:
            assert time.monotonic() < stopped_at[0] + 10
    finally:
        if hvd.rank() == 0:
            os.kill(pids[1], signal.SIGCONT)
