"""Process sets over generations: made again with the ranks that are left."""

from __future__ import annotations

import re

from launching import Launcher

PROGRAM = """
import os, sys, time
import numpy as np
import polyhvd.numpy as hvd
first, second = hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2, 3])
hvd.init(process_sets=[first, second])
dynamic = [None]
state = hvd.elastic.ArrayState(step=0, pids=[])

@hvd.elastic.run
def train(state):
    if state.step == 0:
        dynamic[0] = hvd.add_process_set([0, 3])
        state.pids = hvd.allgather_object(os.getpid())
    while state.step < 40:
        hvd.barrier()
        if state.step == 10 and first.ranks == [0, 1] and hvd.rank() == KILLED[-1]:
            for rank in KILLED:  # the last is this one
                os.kill(state.pids[rank], 9)
        sums = []
        for item in (first, second, dynamic[0]):
            if item is None:
                continue
            if item.process_set_id is None:
                try:
                    hvd.allreduce(np.ones(1), process_set=item)
                    sums.append("no error")
                except hvd.InvalidArgumentError as error:
                    sums.append("is not registered" in str(error))
            elif item.included():
                own = np.full(1, 10.0 ** hvd.rank())
                sums.append(int(hvd.allreduce(own, op=hvd.Sum, process_set=item)[0]))
        state.step += 1
        if state.step == 40:
            sets = [item and item.ranks for item in (first, second, dynamic[0])]
            print("sums", hvd.rank(), hvd.size(), sums, sets, flush=True)
        time.sleep(0.02)
        state.commit()

train(state)
"""


def run(launcher: Launcher, killed: list[int], *options: str) -> list[str]:
    source = PROGRAM.replace("KILLED", str(killed))
    status, out, err = launcher.run("-np", "4", "--min-np", "2", *options, source=source)
    assert status == 0, err
    return sorted(re.findall(r"sums .*", out))


REST = ("--blacklist-cooldown-range", "900", "900")


def test_sets_have_the_ranks_that_are_left(launcher: Launcher) -> None:
    assert run(launcher, [1], *REST) == [
        "sums 0 3 [1, 101] [[0], [1, 2], [0, 2]]",
        "sums 1 3 [110] [[0], [1, 2], [0, 2]]",
        "sums 2 3 [110, 101] [[0], [1, 2], [0, 2]]",
    ]


def test_set_whose_ranks_are_lost_is_not_registered_any_more(launcher: Launcher) -> None:
    assert run(launcher, [1, 0], *REST) == [
        "sums 0 2 [True, 11] [[], [0, 1], [1]]",
        "sums 1 2 [True, 11, 10] [[], [0, 1], [1]]",
    ]


def test_newcomer_s_sets_are_those_of_the_others(launcher: Launcher) -> None:
    assert run(launcher, [1], "--spares", "1") == [
        "sums 0 4 [1, 101] [[0], [1, 2], [0, 2]]",
        "sums 1 4 [110] [[0], [1, 2], [0, 2]]",
        "sums 2 4 [110, 101] [[0], [1, 2], [0, 2]]",
        "sums 3 4 [] [[0], [1, 2], None]",
    ]


#: A rank is lost, and then the newcomer while it gets its arrays, for which there is a process set.
KILLED_IN_SYNC = """
import os
import numpy as np
import polyhvd.numpy as hvd
from polyhvd.elastic import arrays
from polyhvd.runtime import current
first = hvd.ProcessSet([0, 1])
hvd.init(process_sets=[first])
state = hvd.elastic.ArrayState(step=0, w=np.zeros(1000))
sync = arrays.ArraysState._sync_from

def sync_from(self, root, *, among):
    world = current.world()
    if world.placement.generation == 2:
        assert (among is None) == (hvd.rank() == 1), (hvd.rank(), among)
        assert sorted(world.engine.process_sets().values()) == [[0], [0, 1, 2], [0, 2]]
        if hvd.rank() == 2:
            os.kill(os.getpid(), 9)
    sync(self, root, among=among)

arrays.ArraysState._sync_from = sync_from

@hvd.elastic.run
def train(state):
    generation = current.world().placement.generation
    while state.step < 40:
        hvd.barrier()
        if state.step == 10 and generation == 1 and hvd.rank() == 1:
            os.kill(os.getpid(), 9)
        state.w += 1
        state.step += 1
        hvd.barrier()  # which rank 1 does not reach: the other ranks have the commit of step 10
        state.commit()
    hvd.barrier()
    hvd.barrier()
    sets = sorted(current.world().engine.process_sets().values())
    print("sets", generation, hvd.rank(), sets, set(state.w.tolist()), flush=True)

train(state)
"""


def test_process_set_of_a_sync_that_has_failed_is_not_in_the_next_world(launcher: Launcher) -> None:
    options = ("-np", "3", "--min-np", "3", "--spares", "2")
    status, out, err = launcher.run(*options, source=KILLED_IN_SYNC)
    assert status == 0, err
    found = sorted(re.findall(r"sets .*", out))
    assert found == [f"sets 3 {rank} [[0], [0, 1, 2]] {{40.0}}" for rank in range(3)]


#: Rank 1 has what rank 2 lacks, and nothing to do but to end.
LEAVES_AFTER_SYNC = """
import numpy as np
import polyhvd.numpy as hvd
hvd.init()
state = hvd.elastic.ArrayState(w=np.zeros(1000), step=0)
state.sync()
if hvd.rank() < 2:
    state.step = 5
    state.commit()
    state.restore()
state.sync()
print("synced", hvd.rank(), state.step, flush=True)
"""


def test_rank_that_ends_after_a_sync_does_not_fail_those_who_still_receive(launcher: Launcher) -> None:
    status, out, err = launcher.run("-np", "3", source=LEAVES_AFTER_SYNC)
    assert status == 0, err
    assert sorted(re.findall(r"synced .*", out)) == [f"synced {rank} 5" for rank in range(3)]
