"""Alltoall, reducescatter, groups, join and process sets that come and go, against NumPy."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


def mine(np, rank, shape, dtype="float32"):
    """A rank's values: other ones on each rank and in each place."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 + 10 * (rank + 1)).astype(dtype)


def equal(np, got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_array_equal(got.asnumpy(), want)


@pytest.mark.ranks(3)
def test_alltoall_with_and_without_splits(hvd, mx, np):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for dtype in ("int32", "float16", "float64"):
        every = [mine(np, r, (2 * size, 3), dtype) for r in range(size)]
        want = np.concatenate([x[2 * rank : 2 * rank + 2] for x in every])
        equal(np, hvd.alltoall(mx.nd.array(every[rank], dtype=dtype)), want)
    # Rank r has rows to spare, and sends r + p rows to rank p, none at all from 0 to 0.
    splits = [[r + p for p in range(size)] for r in range(size)]
    every = [mine(np, r, (sum(splits[r]) + r, 2)) for r in range(size)]
    starts = [[sum(s[:p]) for p in range(size)] for s in splits]
    want = np.concatenate([every[r][starts[r][rank] :][: splits[r][rank]] for r in range(size)])
    received = [splits[r][rank] for r in range(size)]
    x = mx.nd.array(every[rank])
    for given in (
        splits[rank],
        tuple(splits[rank]),
        np.array(splits[rank], dtype=np.int32),
        mx.nd.array(splits[rank], dtype="int32"),
    ):
        got, counts = hvd.alltoall(x, splits=given, priority=3)
        equal(np, got, want)
        equal(np, counts, np.array(received, dtype=np.int32))
    handle = hvd.alltoall_async(x, splits[rank], name="again")
    assert type(handle) is not tuple
    got, counts = hvd.synchronize(handle)
    assert hvd.poll(handle)
    equal(np, got, want)
    got, counts = hvd.alltoall(mx.np.array(every[rank]), splits[rank])
    assert type(got) is type(counts) is mx.np.ndarray
    # One rank takes everything, without any help from np_shape.
    got, counts = hvd.alltoall(mx.nd.ones((4, 2)), splits=[0, 4, 0])
    assert got.shape == ((12, 2) if rank == 1 else (0, 2))
    assert counts.asnumpy().tolist() == [4 if rank == 1 else 0] * 3
    assert got.asnumpy().sum() == got.size


@pytest.mark.ranks(2)
def test_bad_calls_are_refused_at_once(hvd, mx, np):
    hvd.init()
    x = mx.nd.ones((5, 2))
    for splits, match in (
        ([1, 2, 3], "splits has 3 entries for 2 ranks"),
        ([3, 3], r"splits \[3, 3\] sum to 6, more than the first dimension of 5"),
        ([-1, 3], "entries are from 0"),
        (None, "first dimension of 5 cannot be divided equally among 2 ranks"),
        ([1.0, 2.0], "splits=.*whole number"),
        (mx.nd.array([1, 2]), "splits=.*whole number"),
        ([[1, 2]], "splits=.*one dimension"),
    ):
        with pytest.raises(hvd.InvalidArgumentError, match=match):
            hvd.alltoall(x, splits, name="mine")
    with mx.util.np_shape(True):
        scalar = mx.np.array(1.0)
    for call in (hvd.alltoall, hvd.reducescatter, hvd.allgather):
        with pytest.raises(hvd.InvalidArgumentError, match="'mine': a scalar has no first dimension"):
            call(scalar, name="mine")
    with pytest.raises(hvd.InvalidArgumentError, match="reducescatter 'mine': op=Adasum"):
        hvd.reducescatter(x, op=hvd.Adasum, name="mine")
    with pytest.raises(hvd.InvalidArgumentError, match="average of bool"):
        hvd.reducescatter(mx.np.array([True, False], dtype="bool"))
    assert hvd.alltoall(mx.nd.ones(2), name="mine").asnumpy().tolist() == [1.0, 1.0]


@pytest.mark.ranks(3)
def test_reducescatter_gives_the_first_ranks_a_row_more(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    for rows, first, last in ((7, (0, 3, 5)[rank], (3, 5, 7)[rank]), (2, min(rank, 2), min(rank + 1, 2))):
        total = sum(mine(np, r, (rows, 2)) for r in range(3))[first:last]
        x = mx.nd.array(mine(np, rank, (rows, 2)))
        equal(np, hvd.reducescatter(x, op=hvd.Sum), total)
        got = hvd.reducescatter(x, prescale_factor=3.0, postscale_factor=0.5, name="mean")
        np.testing.assert_allclose(got.asnumpy(), total / 2)
        equal(
            np,
            hvd.synchronize(hvd.reducescatter_async(x, hvd.Max, priority=1)),
            mine(np, 2, (rows, 2))[first:last],
        )
        whole = mx.nd.array(mine(np, rank, (rows,), "int32"), dtype="int32")
        a, b = hvd.grouped_reducescatter([x, whole], op=hvd.Sum)
        equal(np, a, total)
        equal(np, b, sum(mine(np, r, (rows,), "int32") for r in range(3))[first:last])
        a, b = hvd.synchronize(hvd.grouped_reducescatter_async([whole, x], op=hvd.Sum))
        equal(np, b, total)


@pytest.mark.ranks(2)
def test_a_group_may_hold_several_dtypes(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    arrays = [mx.nd.array(mine(np, rank, s, t), dtype=t) for s, t in (((3,), "float16"), ((2, 2), "int64"))]
    want = [
        mine(np, 0, (3,), "float16") + mine(np, 1, (3,), "float16"),
        mine(np, 0, (2, 2), "int64") * 2 + 10,
    ]
    for got, total in zip(hvd.grouped_allreduce(arrays, op=hvd.Sum), want, strict=True):
        equal(np, got, total)
    gathered = hvd.grouped_allgather([arrays[0], mx.nd.ones((rank + 1, 2)) * rank])
    equal(np, gathered[0], np.concatenate([mine(np, r, (3,), "float16") for r in range(2)]))
    np.testing.assert_array_equal(gathered[1].asnumpy(), [[0, 0], [1, 1], [1, 1]])
    again = hvd.synchronize(hvd.grouped_allgather_async(arrays, name="again", priority=1))
    equal(np, again[1], np.concatenate([mine(np, r, (2, 2), "int64") for r in range(2)]))
    for x, got, total in zip(arrays, hvd.grouped_allreduce_(arrays, op=hvd.Sum), want, strict=True):
        assert x is got
        equal(np, x, total)


@pytest.mark.ranks(2)
def test_adasum(hvd, mx, np):
    hvd.init()
    x = mx.nd.array([[3.0, 0.0], [0.0, 2.0]][hvd.rank()])
    assert hvd.allreduce(x, op=hvd.Adasum).asnumpy().tolist() == [3.0, 2.0]
    assert hvd.allreduce(mx.nd.ones(4), op=hvd.Adasum).asnumpy().tolist() == [1.0] * 4
    hvd.allreduce_(x, op=hvd.Adasum)
    assert x.asnumpy().tolist() == [3.0, 2.0]


def slowly(mx, x):
    """``x``, after MXNet's engine has worked for a while."""
    a = mx.nd.ones((700, 700)) / 700
    for _ in range(12):
        a = mx.nd.dot(a, a)
    return x + a[0, 0:1] * 0


@pytest.mark.ranks(2)
def test_join_comes_after_everything_that_mxnet_was_given(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    results = []
    for _ in range(2 + 2 * rank):
        # Still under way in MXNet's engine when join() is called, and all under one name.
        x = slowly(mx, mx.nd.ones(3) * (rank + 1))
        results.append(hvd.allreduce(x, op=hvd.Sum, name="same"))
        with mx.autograd.record():
            x.attach_grad()
            loss = (hvd.allreduce(x, op=hvd.Sum) * (rank + 1)).sum()
        loss.backward()
        results.append(x.grad)
    if rank == 1:
        np.testing.assert_allclose(hvd.allgather(mx.nd.ones(2)).asnumpy(), [1.0, 1.0])
        got, counts = hvd.alltoall(mx.nd.ones(3), splits=[0, 2])
        assert got.shape == (2,)
        assert counts.asnumpy().tolist() == [0, 2]
        np.testing.assert_allclose(hvd.reducescatter(mx.nd.ones(4) * 4).asnumpy(), [2.0, 2.0])
        x = mx.nd.ones(4)
        x.attach_grad()
        with mx.autograd.record():
            loss = hvd.reducescatter(x, op=hvd.Sum, name="rows").sum()
        loss.backward()  # rank 0's rows go nowhere; Horovod's gradient is times size()
        np.testing.assert_allclose(x.grad.asnumpy(), [0.0, 0.0, 2.0, 2.0])
    assert hvd.join() == 1
    for batch, got in enumerate(results):
        np.testing.assert_allclose(got.asnumpy(), np.full(3, 3.0 if batch < 4 else 2.0), rtol=1e-4)
    assert hvd.allreduce(mx.nd.ones(1), op=hvd.Sum).asscalar() == 2.0


@pytest.mark.ranks(3)
def test_process_sets_that_come_and_go(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    for _ in range(2):
        ends = hvd.add_process_set([0, 2])
        if ends.included():
            x = mx.nd.ones((4, 1)) * rank
            assert hvd.alltoall(x, process_set=ends).asnumpy().ravel().tolist() == [0.0, 0.0, 2.0, 2.0]
            assert hvd.reducescatter(x, process_set=ends).asnumpy().ravel().tolist() == [1.0, 1.0]
            got = hvd.grouped_allgather([x[:1], x[:2]], process_set=ends)
            assert [g.asnumpy().ravel().tolist() for g in got] == [[0.0, 2.0], [0.0, 0.0, 2.0, 2.0]]
            x.attach_grad()
            with mx.autograd.record():
                loss = (hvd.allgather(x, process_set=ends) * mx.nd.arange(8).reshape((8, 1))).sum()
            loss.backward()
            first = 4 * ends.rank()
            # Horovod's gradient: the sum over the ranks, divided by their number.
            assert x.grad.asnumpy().ravel().tolist() == [1.0 * i for i in range(first, first + 4)]
            hvd.barrier(ends)
        else:
            for call in (hvd.alltoall, hvd.reducescatter, hvd.allgather):
                with pytest.raises(hvd.InvalidArgumentError, match="rank 1 is not in"):
                    call(mx.nd.ones(2), process_set=ends)
        assert hvd.remove_process_set(ends)
        with pytest.raises(hvd.InvalidArgumentError, match="not registered"):
            hvd.alltoall(mx.nd.ones(2), process_set=ends)


@pytest.mark.ranks(1)
def test_signatures_are_horovods(hvd, mx, np):
    import inspect

    world = hvd.global_process_set
    reducing = {"prescale_factor": 1.0, "postscale_factor": 1.0}
    named = {"name": None, "priority": 0}
    reduction = {"average": None, **named, **reducing, "process_set": world, "op": None}
    scatter = {"op": hvd.Average, **named, "process_set": world, **reducing}
    required = inspect.Parameter.empty
    for verb, expected in {
        "allreduce": {"tensor": required, **reduction},
        "grouped_allreduce": {"tensors": required, **reduction},
        "allgather": {"tensor": required, **named, "process_set": world},
        "grouped_allgather": {"tensors": required, **named, "process_set": world},
        "broadcast": {"tensor": required, "root_rank": required, **named, "process_set": world},
        "alltoall": {"tensor": required, "splits": None, **named, "process_set": world},
        "reducescatter": {"tensor": required, **scatter},
        "grouped_reducescatter": {"tensors": required, **scatter},
    }.items():
        in_place = ("_", "_async_") if verb in ("allreduce", "grouped_allreduce", "broadcast") else ()
        for form in ("", "_async", *in_place):
            function = getattr(hvd, verb + form)
            found = {p.name: p.default for p in inspect.signature(function).parameters.values()}
            if verb not in ("allreduce", "grouped_allreduce", "alltoall") and form in ("", "_async"):
                assert found.pop("exact_gradient") is None  # ours, and last
            assert list(found.items()) == list(expected.items()), verb + form
            assert function.__name__ == verb + form
            assert function.__doc__
