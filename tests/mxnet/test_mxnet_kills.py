"""Ranks that are killed while gradients are in flight: the others raise, and update nothing from these.

``POLYHVD_TEST_KILLS=200`` kills as many, in place of ten.
"""

from __future__ import annotations

import os
import random
import signal
import time

import kills
import pytest
from fork_servers import ForkServers
from pool import Pool, PoolSpec

KILLS = int(os.environ.get("POLYHVD_TEST_KILLS", "10"))
DELAY_MAX_S = 0.03  # a few steps
KINDS = ("separate", "grouped", "process set", "sparse", "hybridized")
WAITS = (kills.by_save, kills.by_pickle, kills.by_mask, kills.by_dlpack, kills.by_copy_of_rows)


def kill_one(
    fork_servers: ForkServers, seed: int, arrays: int, kind: str, touch: kills.Touch = kills.by_copy
) -> None:
    """A job of its own, of 2 or 3 ranks, in which any is killed at any moment of a step."""
    chance = random.Random(seed)
    size = chance.choice((2, 3))
    victim = chance.randrange(size)
    survivors = [rank for rank in range(size) if rank != victim]
    with Pool(PoolSpec("mxnet", (size,)), fork_servers) as pool:
        reads = chance.random() < 0.5
        pool.start(kills.train_until_killed, seed, arrays, victim, kind, touch, reads)
        pool.note(victim)
        time.sleep(chance.random() * DELAY_MAX_S)  # where in a step is left to chance
        pool.signal(victim, signal.SIGKILL)
        for rank in survivors:
            answer = pool.answer(rank)
            assert answer["is_ours"], (seed, rank, answer)
            assert answer["is_mxnets"], (seed, rank, answer)
            assert f"rank {victim}" in answer["text"], (seed, rank, answer)
            assert answer["wrong"] == [], (seed, rank, answer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arrays", [pytest.param(40, marks=pytest.mark.nightly), 160])
def test_survivors_raise_and_update_nothing_from_a_gradient_that_was_not_reduced(
    fork_servers: ForkServers, arrays: int, kind: str
) -> None:
    for seed in range(KINDS.index(kind), KILLS, len(KINDS)):
        kill_one(fork_servers, seed, arrays, kind)


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("arrays", [40, pytest.param(160, marks=pytest.mark.nightly)])
def test_waits_of_mxnets_own_code_do_so_too(
    fork_servers: ForkServers, arrays: int, wait: kills.Touch
) -> None:
    for seed in range(WAITS.index(wait), KILLS, len(WAITS)):
        kill_one(fork_servers, seed, arrays, "separate", wait)
