"""Objects of ranks that share no memory, each with its MAC: all that works without works with them."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
import pytest

from polyhvd.collectives.seals import Seals
from polyhvd.errors import InvalidArgumentError, PeerLostError
from polyhvd.runtime import current

pytestmark = pytest.mark.ranks(3, framework="numpy", env={"POLYHVD_SHARED_MEMORY": "0"})


def words_of(rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "text": "ä" * 1000 * rank,
        "small": np.arange(rank),
        "large": np.full(1 << 18, rank),
    }


def check_words(found: Any, rank: int) -> None:
    expected = words_of(rank)
    for name in ("small", "large"):
        assert np.array_equal(found.pop(name), expected.pop(name))
    assert found == expected


def test_objects_of_every_rank_come_whole() -> None:
    for root in range(hvd.size()):
        check_words(hvd.broadcast_object(words_of(hvd.rank()), root_rank=root), root)
    for name in (None, "named"):
        for rank, found in enumerate(hvd.allgather_object(words_of(hvd.rank()), name=name)):
            check_words(found, rank)


def test_two_large_arrays_of_one_object_keep_their_places() -> None:
    mine = [np.full(1 << 18, 1.0), np.full((1 << 17, 3), 2.0)] if hvd.rank() == 1 else None
    first, second = hvd.broadcast_object(mine, root_rank=1)
    assert (first == 1.0).all()
    assert (second == 2.0).all()


def test_what_cannot_be_pickled_raises_on_every_rank_and_the_next_call_works() -> None:
    for root in range(hvd.size()):
        mine = threading.Lock() if hvd.rank() == root else None
        with pytest.raises(InvalidArgumentError, match=f"rank {root} cannot pickle a lock"):
            hvd.broadcast_object(mine, root_rank=root)
        with pytest.raises(InvalidArgumentError, match=f"rank {root} cannot pickle a lock"):
            hvd.allgather_object(mine)
    assert hvd.allgather_object(hvd.rank()) == [0, 1, 2]


@pytest.mark.parametrize("members", [[0, 2], [1]])
def test_process_sets_are_signed_by_their_own_ranks(members: list[int]) -> None:
    process_set = hvd.add_process_set(members)
    if hvd.rank() in members:
        assert hvd.allgather_object(hvd.rank(), process_set=process_set) == members
        root = members[-1]
        assert hvd.broadcast_object(hvd.rank(), root_rank=root, process_set=process_set) == root
    hvd.barrier()


def test_a_rank_that_has_joined_neither_sends_nor_disturbs() -> None:
    for _ in range(2):  # once more, when it has caught up
        if hvd.rank() != 1:
            assert hvd.allgather_object(hvd.rank()) == [0, 2]
            assert hvd.broadcast_object(hvd.rank(), root_rank=2) == 2
        hvd.join()
        assert hvd.allgather_object(hvd.rank()) == [0, 1, 2]
        assert hvd.broadcast_object(hvd.rank(), root_rank=1) == 1


def test_threads_may_send_at_once() -> None:
    found: dict[int, list[Any]] = {}

    def work(number: int) -> None:
        found[number] = [hvd.allgather_object((number, i, hvd.rank()), name=f"t{number}") for i in range(5)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        assert found[number] == [[(number, i, rank) for rank in range(3)] for i in range(5)]


def test_no_call_accepts_what_belongs_to_another() -> None:
    """Tags of one call, sender, part and world are good for nothing else."""
    world = current.world()

    def gather(row: Any) -> Any:
        return np.frombuffer(hvd.allgather(row).tobytes(), np.uint8)

    one, other = (Seals(world, "broadcast_object", "x", 0, gather) for _ in range(2))
    tags = {
        one.tag(0, "data", b"abc"),
        one.tag(0, "data", b"abd"),
        one.tag(1, "data", b"abc"),
        one.tag(0, "datab", b"bc"),
        other.tag(0, "data", b"abc"),
        Seals(world, "allgather_object", "x", 0, gather).tag(0, "data", b"abc"),
        Seals(world, "broadcast_object", "y", 0, gather).tag(0, "data", b"abc"),
    }
    assert len(tags) == 7
    assert hvd.allgather_object(one.tag(2, "data", b"abc")) == [one.tag(2, "data", b"abc")] * 3


@pytest.mark.ranks(3, framework="numpy", env={"POLYHVD_SHARED_MEMORY": "0"}, fresh=True)
def test_what_fails_its_mac_ends_the_job_everywhere_with_the_same_words(monkeypatch: Any) -> None:
    """Rank 2's key differs: as if all that it sends and gets were changed."""
    loads = pickle.loads
    loaded: list[Any] = []
    monkeypatch.setattr(pickle, "loads", lambda *a, **o: loaded.append(loads(*a, **o)) or loaded[-1])
    if hvd.rank() == 2:
        current.world().key = bytes(32)
    with pytest.raises(PeerLostError, match=r"allgather_object: what rank . sent to rank . was changed"):
        hvd.allgather_object("word")
    assert not loaded
    with pytest.raises(PeerLostError, match="was changed, replayed or lost in transit"):
        hvd.barrier()
