"""The memory store's descriptors, beyond what every store keeps to."""

from __future__ import annotations

import os
import select
import threading

import pytest

from polyhvd.rendezvous.memory import Memory, MemoryStore
from polyhvd.rendezvous.store import StoreError


def readable(store: MemoryStore) -> bool:
    return bool(select.select([store], [], [], 0)[0])


def test_descriptor_is_readable_after_a_value_and_not_after_it_was_looked_for() -> None:
    memory = Memory()
    with MemoryStore(memory, 0) as waiting, MemoryStore(memory, 1) as writing:
        request = waiting.post_gather("a", 2, 30)
        assert waiting.take(request) is None
        assert not readable(waiting)
        writing.put("a", 0, b"x")
        assert readable(waiting)
        assert waiting.take(request) is None
        assert not readable(waiting)
        writing.put("a", 1, b"y")
        assert waiting.take(request) == [b"x", b"y"]


def test_rank_that_blocks_is_woken_when_the_memory_is_closed() -> None:
    memory = Memory()
    errors: list[StoreError] = []

    def wait() -> None:
        try:
            store.gather("never", 1, 1000)
        except StoreError as error:
            errors.append(error)

    with MemoryStore(memory, 0) as store:
        thread = threading.Thread(target=wait)
        thread.start()
        memory.close()
        thread.join(20)
        assert not thread.is_alive()
    assert "the memory that the ranks share is closed" in str(errors[0])


def test_stores_leave_no_descriptor() -> None:
    memory = Memory()
    before = len(os.listdir("/proc/self/fd"))
    for rank in range(50):
        with MemoryStore(memory, rank) as store:
            store.put("a", 0, b"x")
    assert len(os.listdir("/proc/self/fd")) == before
    with MemoryStore(memory, 0) as store:
        assert store.gather("a", 1, 10) == [b"x"]


@pytest.mark.parametrize("secret", [None, bytes(32)])
def test_memories_are_jobs_of_their_own(secret: bytes | None) -> None:
    assert Memory(secret).job != Memory(secret).job
