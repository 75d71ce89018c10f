"""Every collective over every transport, against NumPy, and which transport has carried the bytes."""

from __future__ import annotations

from typing import Any

import collectives
import exchange
import numpy as np
import oracle
import polyhvd.numpy as hvd
import pytest
from pool import Pool
from worlds import assert_alike


@pytest.mark.sample(14)
@pytest.mark.layouts(own=True)
@pytest.mark.parametrize("op", ["Sum", "Average", "Min", "Max", "Product"])
def test_allreduce_returns_the_reduction_on_every_rank(pool: Pool, world: Any, op: str) -> None:
    assert_alike(pool.run(collectives.allreduce, "numpy", op, 1.0, 1.0, world.groups))


@pytest.mark.layouts(own=True)
def test_allreduce_scales_before_and_after_the_sum(pool: Pool, world: Any) -> None:
    assert_alike(pool.run(collectives.allreduce, "numpy", "Sum", 0.3, 0.7, world.groups))


@pytest.mark.sample(6)
def test_allreduces_in_flight_may_be_submitted_in_any_order(pool: Pool) -> None:
    assert_alike(pool.run(collectives.allreduce_async, "numpy", "Max", True))


@pytest.mark.layouts(ranks_min=3, ordered=True)  # a + b is b + a: nothing to show; and MPI adds as it likes
def test_order_grouping_and_offset_do_not_show_in_the_bits(pool: Pool, world: Any) -> None:
    for seed in (1, 2):
        assert_alike(pool.run(collectives.same_bits, "numpy", seed, world.groups))


@pytest.mark.layouts(own=True)
def test_infinities_nans_and_signed_zeros_follow_numpy(pool: Pool) -> None:
    assert_alike(pool.run(collectives.special_values, "numpy"))


@pytest.mark.layouts(own=True)
def test_integers_wrap_around_and_keep_their_last_digits(pool: Pool) -> None:
    assert_alike(pool.run(collectives.ends_of_ranges, "numpy"))


@pytest.mark.sample(14)
@pytest.mark.layouts(own=True)
@pytest.mark.parametrize("pattern", ["growing", "many", "one has none", "only the last has some", "none"])
def test_allgather_concatenates_in_rank_order(pool: Pool, pattern: str) -> None:
    assert_alike(pool.run(collectives.allgather, "numpy", pattern))


@pytest.mark.sample(6)
def test_allgathers_in_flight_keep_their_rows_apart(pool: Pool) -> None:
    assert_alike(pool.run(collectives.allgather_async, "numpy"))


@pytest.mark.layouts(own=True)
def test_broadcast_returns_the_roots_values(pool: Pool) -> None:
    assert_alike(pool.run(collectives.broadcast, "numpy"))


@pytest.mark.sample(6)
def test_broadcasts_from_all_roots_may_be_in_flight(pool: Pool) -> None:
    assert_alike(pool.run(collectives.broadcast_async, "numpy", True))


@pytest.mark.sample(14)
@pytest.mark.layouts(own=True)
@pytest.mark.parametrize("pattern", ["uneven", "many", "all to the last", "some none"])
def test_alltoall_hands_out_rows(pool: Pool, pattern: str) -> None:
    pool.run(exchange.alltoall, "numpy", pattern, True)


@pytest.mark.sample(10)
@pytest.mark.layouts(own=True)
@pytest.mark.parametrize("op", ["Sum", "Average", "Max"])
def test_reducescatter_keeps_the_rows_of_each_rank(pool: Pool, op: str) -> None:
    pool.run(exchange.reducescatter, "numpy", op)


@pytest.mark.sample(6)
def test_groups_of_any_element_types_are_one_operation(pool: Pool) -> None:
    pool.run(exchange.grouped, "numpy")


@pytest.mark.layouts(own=True)
def test_adasum_follows_its_formula(pool: Pool) -> None:
    pool.run(exchange.adasum, "numpy")


def test_all_operations_may_be_in_flight_together(pool: Pool) -> None:
    pool.run(exchange.everything_in_flight, "numpy")


@pytest.mark.sample(6)
def test_many_small_gathers_and_scatters_in_flight_keep_apart(pool: Pool) -> None:
    assert_alike(pool.run(exchange.many_small, "numpy"))


@pytest.mark.sample(6)
@pytest.mark.layouts(ordered=True)  # MPI adds as it likes
def test_what_runs_with_a_scatter_does_not_show_in_its_bits(pool: Pool) -> None:
    pool.run(exchange.scattered_bits, "numpy")


def count_batches() -> tuple[int, int]:
    """Of 200 sparse gradients, and as many scatters: the batches of the step that took the fewest.

    A large gradient goes ahead, and while it travels the small ones are submitted: how fast they are does
    not matter then.
    """
    fewest = [200, 200]
    large = np.ones(8 << 20, np.float32)
    values = [np.full((1 + (i + hvd.rank()) % 3, 4), i, np.float32) for i in range(200)]
    rows = [np.arange(len(value)) for value in values]
    parts = [np.ones((hvd.size(), 4), np.float32)] * 200
    for _ in range(5):
        for kind in (0, 1):
            hvd.barrier()
            before = hvd.counters()["batches"]
            ahead = hvd.allreduce_async_(large, name="large", op=hvd.Max)
            if kind == 0:
                flying = [
                    hvd.grouped_allgather_async(list(pair), name=f"sparse {i}")
                    for i, pair in enumerate(zip(values, rows, strict=True))
                ]
            else:
                flying = [
                    hvd.reducescatter_async(part, name=f"part {i}", op=hvd.Sum)
                    for i, part in enumerate(parts)
                ]
            for handle in (ahead, *flying):
                hvd.synchronize(handle)
            fewest[kind] = min(fewest[kind], hvd.counters()["batches"] - before)
    return fewest[0], fewest[1]


@pytest.mark.layouts(ranks_min=2, own=True)  # one rank sends nothing that others would wait behind
def test_two_hundred_sparse_gradients_of_a_step_travel_in_a_few_batches(pool: Pool) -> None:
    for gathers, scatters in pool.run(count_batches):
        assert gathers <= 10
        assert scatters <= 10


@pytest.mark.sample(6)
def test_ranks_without_data_stand_in_with_neutral_elements(pool: Pool) -> None:
    pool.run(exchange.join, "numpy")


@pytest.mark.sample(6)
def test_process_sets_overlap_and_come_and_go(pool: Pool) -> None:
    pool.run(exchange.process_sets, "numpy")


def count_bytes(kind: str, count: int) -> dict[str, int]:
    """By how much the counters grow during one operation on `count` floats."""
    tensor = np.full(count, hvd.rank(), np.float32)
    hvd.barrier()
    before = hvd.counters()
    if kind == "allreduce":
        oracle.check(kind, hvd.allreduce(tensor, op=hvd.Sum), np.full_like(tensor, sum(range(hvd.size()))))
    elif kind == "allgather":
        oracle.check(kind, hvd.allgather(tensor), np.repeat(np.arange(hvd.size()), count).astype(np.float32))
    else:
        oracle.check(kind, hvd.broadcast(tensor, 0), np.zeros_like(tensor))
    after = hvd.counters()
    return {name: after[name] - before[name] for name in after}


@pytest.mark.sample(22)
@pytest.mark.parametrize("count", [1000, 1_000_000])
@pytest.mark.parametrize("kind", ["allreduce", "allgather", "broadcast"])
def test_counters_prove_which_transport_has_carried_the_data(
    pool: Pool, world: Any, kind: str, count: int
) -> None:
    """Within a host nothing goes through TCP; between hosts each one has to send what it knows."""
    grown = pool.run(count_bytes, kind, count)
    total = {name: sum(item[name] for item in grown) for name in grown[0]}
    assert [item["operations"] for item in grown] == [1] * world_size(world), grown
    assert (total["shm_bytes"] > 0) == world.shm, total
    assert (total["cma_bytes"] > 0) == (world.cma and kind == "allreduce"), total
    assert (total["tcp_bytes_sent"] > 0) == world.tcp, total
    assert (total["mpi_bytes"] > 0) == world.mpi, total
    assert total["tcp_bytes_sent"] == total["tcp_bytes_received"], total
    if world.tcp:
        least, most = bounds_of_tcp(world, kind, 4 * count)
        assert least <= total["tcp_bytes_sent"] <= most, total


def bounds_of_tcp(world: Any, kind: str, payload: int) -> tuple[int, int]:
    """What has to reach the other hosts at least, and hardly more than that, as nothing is sent in vain."""
    hosts = len(world.groups)
    least = most = {
        "allreduce": 2 * (hosts - 1) * payload,  # the least of any algorithm: reduce-scatter and gather
        "allgather": (hosts - 1) * world_size(world) * payload,
        "broadcast": (hosts - 1) * payload,
    }[kind]
    if kind == "allreduce":
        most = hosts * (hosts - 1) * payload
    return least, most + 4096 * hosts * hosts


def world_size(world: Any) -> int:
    return sum(world.hosts)


def take_subsets() -> None:
    """Process sets that cross hosts and lie within them, in flight together."""
    size, rank = hvd.size(), hvd.rank()
    everyone = range(size)
    members = []
    for ranks in (everyone[::2], everyone[1::2], [0, size - 1], everyone[:1], everyone):
        if list(ranks) not in members:
            members.append(list(ranks))
    sets = [hvd.ProcessSet(list(ranks)) for ranks in members]
    hvd.shutdown()
    hvd.init(process_sets=sets)
    mine = [i for i, item in enumerate(sets) if item.included()]
    for count, dtype in ((5, np.dtype(np.uint64)), (100_000, np.dtype(np.int64))):
        flying = []
        for i in np.random.default_rng(rank).permutation(mine):
            terms = [oracle.contribution(dtype, (count,), r, i) for r in members[i]]
            tensor = terms[members[i].index(rank)]
            rows = tensor[: 10 * (1 + members[i].index(rank))]
            root = members[i][-1]
            flying += [
                (hvd.allreduce_async(tensor, name="sum", op=hvd.Sum, process_set=sets[i]), sum(terms)),
                (
                    hvd.allgather_async(rows, name="rows", process_set=sets[i]),
                    np.concatenate([term[: 10 * (1 + k)] for k, term in enumerate(terms)]),
                ),
                (hvd.broadcast_async(tensor, root, name="root", process_set=sets[i]), terms[-1]),
            ]
        for handle, expected in flying:
            oracle.check(f"set with {count}", hvd.synchronize(handle), expected)
    hvd.barrier()  # rank 0, which leads, must not leave before the sets without it are done
    hvd.shutdown()
    hvd.init()


@pytest.mark.sample(6)
def test_process_sets_may_be_busy_at_the_same_time(pool: Pool) -> None:
    if pool.size < 2:
        pytest.skip("one rank has no two process sets")
    pool.run(take_subsets)
