"""Sums made in other ranks' memory: when that is allowed, which way is taken, and who may not write."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import oracle
import polyhvd.numpy as hvd
import pytest
from pool import Pool, PoolSpec

from polyhvd.testing import worker

_ALWAYS = (("POLYHVD_CMA", "1"),)


def reduce_in_turns(sizes: list[int], rounds: int) -> dict[str, int]:
    """Exact sums of other numbers each time; what has grown of the counters."""
    before = hvd.counters()
    ranks = np.arange(hvd.size())
    for i in range(rounds):
        for count in sizes:
            tensor = np.arange(count, dtype=np.int64) * (hvd.rank() + 1) + i
            expected = np.arange(count, dtype=np.int64) * int((ranks + 1).sum()) + i * hvd.size()
            hvd.allreduce_(tensor, name=f"{count}", op=hvd.Sum)
            oracle.check(f"{count}", tensor, expected)
    return {name: value - before[name] for name, value in hvd.counters().items()}


def test_ranks_weigh_both_ways_and_come_to_one_choice(start: Callable[[PoolSpec], Pool]) -> None:
    """Did they not agree, one would wait for what the other never stages."""
    pool = start(PoolSpec("numpy", (3,)))
    for grown in pool.run(reduce_in_turns, [5_000, 20_000, 300_001], 300):
        assert 0 < grown["cma_bytes"] < grown["shm_bytes"], grown


def test_more_tensors_than_a_system_call_takes_are_one_operation(start: Callable[[PoolSpec], Pool]) -> None:
    pool = start(PoolSpec("numpy", (2,), _ALWAYS))
    assert all(grown > 0 for grown in pool.run(reduce_many, 3_000))


def reduce_many(count: int) -> int:
    before = hvd.counters()["cma_bytes"]
    tensors = [np.full(1 + i % 5, hvd.rank() + i, np.float32) for i in range(count)]
    for i, found in enumerate(hvd.grouped_allreduce(tensors, name="many", op=hvd.Sum)):
        oracle.check(f"{i}", found, np.full(1 + i % 5, 2 * i + 1, np.float32))
    return hvd.counters()["cma_bytes"] - before


def test_the_rank_that_may_least_decides_for_all(start: Callable[[PoolSpec], Pool]) -> None:
    pool = start(PoolSpec("numpy", (3,), _ALWAYS))
    pool.run(begin_again_with, {"POLYHVD_CMA": "0"}, 1)
    for grown in pool.run(reduce_in_turns, [10, 20_000], 10):
        assert grown["cma_bytes"] == 0, grown


def begin_again_with(settings: dict[str, str], rank: int) -> None:
    here = hvd.rank() == rank
    hvd.shutdown()
    if here:
        os.environ.update(settings)
    hvd.init()


def test_ranks_that_may_not_be_traced_hand_tensors_over_in_shared_memory(
    start: Callable[[PoolSpec], Pool],
) -> None:
    pool = start(PoolSpec("numpy", (2,), _ALWAYS))
    pool.run(forbid_tracing)
    for grown in pool.run(reduce_in_turns, [10, 20_000], 10):
        assert grown["cma_bytes"] == 0 < grown["shm_bytes"], grown


def forbid_tracing() -> None:
    """As a process that is not dumpable, seen by one without root's privilege to trace it all the same."""
    libc = ctypes.CDLL(None, use_errno=True)
    pr_set_dumpable, capability_version_3, cap_sys_ptrace = 4, 0x20080522, 19

    class Header(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    header = Header(capability_version_3, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable, of 32 capabilities each
    assert libc.capget(ctypes.byref(header), sets) == 0
    sets[0] &= ~(1 << cap_sys_ptrace)
    sets[1] &= ~(1 << cap_sys_ptrace)
    assert libc.capset(ctypes.byref(header), sets) == 0
    assert libc.prctl(pr_set_dumpable, 0, 0, 0, 0) == 0


def reduce_what_cannot_be_read(count: int) -> tuple[int, int]:
    """Growth of cma_bytes by an operation on secret memory of rank 0, and by one on ordinary memory."""
    secret = hvd.rank() == 0
    memory = secret_memory(4 * count) if secret else None
    tensor = np.full(count, 1.0, np.float32) if memory is None else np.frombuffer(memory, np.float32, count)
    tensor[:] = hvd.rank() + 1
    before = hvd.counters()["cma_bytes"]
    hvd.allreduce_(tensor, name="secret", op=hvd.Sum)
    between = hvd.counters()["cma_bytes"]
    oracle.check("secret", tensor, np.full(count, 3, np.float32))
    other = np.full(count, hvd.rank() + 1, np.float32)
    hvd.allreduce_(other, name="ordinary", op=hvd.Sum)
    oracle.check("ordinary", other, np.full(count, 3, np.float32))
    return between - before, hvd.counters()["cma_bytes"] - between


def secret_memory(size: int) -> mmap.mmap:
    memfd_secret = 447
    descriptor = ctypes.CDLL(None, use_errno=True).syscall(memfd_secret, 0)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "memfd_secret")
    os.ftruncate(descriptor, size)
    memory = mmap.mmap(descriptor, size)
    os.close(descriptor)
    return memory


def has_secret_memory() -> bool:
    try:
        secret_memory(mmap.PAGESIZE).close()
    except OSError as error:
        return error.errno != errno.ENOSYS
    return True


def test_memory_that_only_its_process_can_read_is_staged(start: Callable[[PoolSpec], Pool]) -> None:
    """Secret memory, as the kernel calls it, in place of what a GPU's driver has pinned."""
    if not has_secret_memory():
        pytest.skip("this kernel has no memfd_secret")
    pool = start(PoolSpec("numpy", (2,), _ALWAYS))
    for of_secret, of_ordinary in pool.run(reduce_what_cannot_be_read, 20_000):
        assert of_secret == 0 < of_ordinary


def reduce_until_told_off(count: int) -> str:
    tensor = np.zeros(count, np.float32)
    try:
        for i in range(1 << 30):
            hvd.allreduce_(tensor, name="loop", op=hvd.Sum)
            if i == 3:
                worker.note("in the loop")
    except hvd.HorovodInternalError as error:
        kind = type(error).__name__
    if hvd.rank() == 0:
        tensor[:] = 7  # as if it were somebody else's by now
        worker.note(kind)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not os.path.exists(os.environ["POLYHVD_TEST_RESUMED"]):
            time.sleep(0.05)
        time.sleep(0.2)
        assert (tensor == 7).all(), "another rank has written here after the error"
    return kind


@contextlib.contextmanager
def stopped_in_a_transfer(pool: Pool) -> Iterator[None]:
    """Stops rank 1; and again, elsewhere, while rank 0 hears nothing of it.

    A rank that was stopped between two operations is waited for as long as it likes.
    """
    heard = threading.Event()

    def stop() -> None:
        pool.signal(1, signal.SIGSTOP)
        while not heard.wait(5):
            pool.signal(1, signal.SIGCONT)
            time.sleep(0.0037)
            pool.signal(1, signal.SIGSTOP)

    thread = threading.Thread(target=stop)
    thread.start()
    try:
        yield
    finally:
        heard.set()
        thread.join()


@pytest.mark.parametrize("after_s", [0.0, 0.0113])
def test_a_rank_that_was_stopped_writes_into_no_memory_that_was_given_up(
    start: Callable[[PoolSpec], Pool], tmp_path: Any, after_s: float
) -> None:
    resumed = tmp_path / "resumed"
    settings = (
        *_ALWAYS,
        ("POLYHVD_DATA_TIMEOUT_SECONDS", "1"),
        ("POLYHVD_TEST_RESUMED", str(resumed)),
    )
    pool = start(PoolSpec("numpy", (2,), settings))
    pool.start(reduce_until_told_off, 16 << 20)
    for rank in range(2):
        pool.note(rank)
    time.sleep(after_s)
    with stopped_in_a_transfer(pool):
        assert pool.note(0) in ("TransferTimeoutError", "PeerLostError")
    pool.signal(1, signal.SIGCONT)
    resumed.touch()
    for rank in range(2):
        pool.answer(rank)
