"""Row_sparse arrays and gradients: equal to what dense ones give, at the cost of the rows touched."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


HEIGHT = 1000
#: Batches of 200 gradients, each of which takes one or more of its own if none is fused. On a busy machine
#: 27 were seen, on an idle one 3.
FEW = 60


def rows(mx, np, indices, dtype="float32", height=HEIGHT):
    """A row_sparse array whose rows hold their indices; none at all is possible."""
    if not indices:
        return mx.nd.sparse.zeros("row_sparse", (height, 3), dtype=dtype)
    values = np.array(indices, dtype)[:, None] * np.ones((1, 3), dtype)
    return mx.nd.sparse.row_sparse_array((values, indices), shape=(height, 3), dtype=dtype)


@pytest.mark.ranks(2)
def test_allreduce_of_row_sparse_arrays_equals_that_of_dense_ones(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    cases = (
        ([1, 4, 999], [0, 4, 7]),
        ([5], [5]),
        ([], [3, 8]),
        ([2, 3], []),
        ([], []),
    )
    for dtype in ("float32", "float64", "float16"):
        for case in cases:
            dense = [rows(mx, np, list(indices), dtype).asnumpy() for indices in case]
            mine = rows(mx, np, list(case[rank]), dtype)
            union = sorted({*case[0], *case[1]})
            total = hvd.allreduce(mine, op=hvd.Sum)
            assert total.stype == "row_sparse"
            assert total.dtype == np.dtype(dtype)
            assert total.indices.asnumpy().tolist() == union
            np.testing.assert_array_equal(total.asnumpy(), dense[0] + dense[1])
            mean = hvd.synchronize(hvd.allreduce_async(mine, name="mean", postscale_factor=2.0))
            np.testing.assert_array_equal(mean.asnumpy(), dense[0] + dense[1])
            np.testing.assert_array_equal(mine.asnumpy(), dense[rank])
            assert hvd.allreduce_(mine) is mine
            assert mine.indices.asnumpy().tolist() == union
            np.testing.assert_array_equal(mine.asnumpy(), (dense[0] + dense[1]) / 2)
    with pytest.raises(hvd.RankMismatchError, match=r"\[1000, 3\], \[1001, 3\]"):
        hvd.allreduce(rows(mx, np, [1], height=HEIGHT + rank))
    with pytest.raises(hvd.InvalidArgumentError, match="sparse array"):
        hvd.allgather(rows(mx, np, [1]))


@pytest.mark.ranks(2, 3)
def test_other_reductions_of_row_sparse_arrays_equal_those_of_dense_ones(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    values = mx.nd.array(np.random.RandomState(rank).randn(3, 2))
    mine = mx.nd.sparse.row_sparse_array((values, [rank, rank + 1, 6]), shape=(8, 2))
    nothing = mx.nd.sparse.zeros("row_sparse", (8, 2))
    for op in (hvd.Max, hvd.Min, hvd.Product, hvd.Adasum):
        for array in (mine, nothing, nothing if rank else mine):
            expected = hvd.allreduce(array.tostype("default"), op=op).asnumpy()
            reduced = hvd.allreduce(array, op=op)
            assert reduced.stype == "row_sparse"
            np.testing.assert_allclose(reduced.asnumpy(), expected, rtol=1e-6)
            named = hvd.synchronize(hvd.allreduce_async(array, op=op, name=f"named {op}"))
            np.testing.assert_array_equal(named.asnumpy(), reduced.asnumpy())
            in_place = array.copy()
            assert hvd.allreduce_(in_place, op=op) is in_place
            np.testing.assert_array_equal(in_place.asnumpy(), reduced.asnumpy())


@pytest.mark.ranks(2)
def test_what_is_sent_does_not_depend_on_the_height(hvd, mx, np):
    hvd.init()

    def bytes_of(height):
        before = hvd.counters()["shm_bytes"]
        hvd.allreduce(rows(mx, np, [1, 5 + hvd.rank()], height=height))
        return hvd.counters()["shm_bytes"] - before

    bytes_of(100)  # what is sent once
    assert bytes_of(100) == bytes_of(10**7) > 0


def embedding(mx, np, sparse):
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Embedding(HEIGHT, 4, sparse_grad=sparse), mx.gluon.nn.Dense(3, in_units=8))
    net.initialize()
    random = np.random.RandomState(3)
    for parameter in net.collect_params().values():
        parameter.set_data(mx.nd.array(random.randn(*parameter.shape)))
    return net


def words(mx, np, step, members):
    """Other words on each rank, some of them common, some twice in a batch."""
    return mx.nd.array(
        np.concatenate(
            [np.random.RandomState(10 * step + r).randint(0, 20, (4, 2)) * (r + 1) for r in members]
        )
    )


def steps(mx, np, net, trainer, members):
    for step in range(5):
        x = words(mx, np, step, members)
        with mx.autograd.record():
            loss = (net(x) ** 2).sum(axis=1)
        loss.backward()
        trainer.step(len(x))


@pytest.mark.ranks(2)
def test_training_an_embedding_with_sparse_gradients(hvd, mx, np):
    hvd.init()
    options = {"learning_rate": 0.05}
    for extra in (
        {},
        {"sparse_as_dense": True},
        {"num_groups": 1},
        {"sparse_as_dense": True, "num_groups": 1},
    ):
        net = embedding(mx, np, True)
        before = net[0].weight.data().asnumpy()
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", options, **extra)
        steps(mx, np, net, trainer, [hvd.rank()])
        alone = embedding(mx, np, False)
        steps(mx, np, alone, mx.gluon.Trainer(alone.collect_params(), "sgd", options, kvstore=None), range(2))
        gradient = net[0].weight.grad()
        assert gradient.stype == "row_sparse"
        assert len(gradient.indices) < 30
        assert np.abs(net[0].weight.data().asnumpy() - before).max() > 1e-3
        for got, want in zip(net.collect_params().values(), alone.collect_params().values(), strict=True):
            np.testing.assert_allclose(got.data().asnumpy(), want.data().asnumpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
def test_the_optimizer_takes_sparse_gradients(hvd, mx, np):
    hvd.init()
    for extra in ({}, {"sparse_as_dense": True}):
        weight = mx.nd.ones((HEIGHT, 3))
        update = mx.optimizer.get_updater(
            hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0), **extra)
        )
        update(0, rows(mx, np, [2, 3 + hvd.rank()]), weight)
        expected = np.ones((HEIGHT, 3))
        for index, value in ((2, 2.0), (3, 1.5), (4, 2.0)):
            expected[index] -= value
        np.testing.assert_allclose(weight.asnumpy(), expected)


@pytest.mark.ranks(2)
def test_two_hundred_sparse_gradients_of_a_step_travel_in_a_few_batches_with_the_same_bits(hvd, mx, np):
    hvd.init()
    count, shape = 200, (40, 3)
    random = np.random.RandomState(hvd.rank())
    weights = {
        stype: [
            mx.gluon.Parameter(f"weight{i}", shape=shape, init=mx.init.Zero(), grad_stype=stype)
            for i in range(count)
        ]
        for stype in ("row_sparse", "default")
    }
    trainers = {}
    for stype, parameters in weights.items():
        for parameter in parameters:
            parameter.initialize()
        trainers[stype] = hvd.DistributedTrainer(parameters, "sgd", {"learning_rate": 0.3}, prefix=stype)
    batches = []
    for _ in range(30):  # on a busy machine some of them are cut in more
        words = [mx.nd.array(random.randint(0, shape[0], random.randint(1, 9))) for _ in range(count)]
        factors = [mx.nd.array(random.randn(word.size, shape[1])) for word in words]
        for stype, parameters in weights.items():
            with mx.autograd.record():
                rows = [
                    mx.nd.Embedding(word, p.data(), *shape, sparse_grad=stype == "row_sparse")
                    for word, p in zip(words, parameters, strict=True)
                ]
                loss = sum((row * factor).sum() for row, factor in zip(rows, factors, strict=True))
            loss.backward()
            mx.nd.waitall()
            hvd.barrier()
            before = hvd.counters()["batches"]
            trainers[stype].step(1)
            mx.nd.waitall()
            if stype == "row_sparse":
                batches.append(hvd.counters()["batches"] - before)
        most = hvd.allreduce(mx.nd.array([min(batches)]), op=hvd.Max, name="most").asscalar()
        if len(batches) >= 3 and most <= FEW:
            break
    assert min(batches) <= FEW, batches
    for sparse, dense in zip(weights["row_sparse"], weights["default"], strict=True):
        np.testing.assert_array_equal(sparse.data().asnumpy(), dense.data().asnumpy())


@pytest.mark.ranks(2)
def test_adasum_of_sparse_gradients_is_that_of_dense_ones(hvd, mx, np):
    hvd.init()

    def adasum(one, other):
        dot = (one * other).sum()
        return one * (1 - dot / (2 * (one**2).sum())) + other * (1 - dot / (2 * (other**2).sum()))

    indices = [([2, 3], [2, 4]), ([1, 999], [5])]  # of two weights, on both ranks
    for extra in ({}, {"num_groups": 1}):
        updater = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0), op=hvd.Adasum, **extra)
        weights = [mx.nd.zeros((HEIGHT, 3)) for _ in indices]
        mine = [rows(mx, np, each[hvd.rank()]) for each in indices]
        updater.update([0, 1], weights, mine, [None, None])
        for weight, each in zip(weights, indices, strict=True):
            want = adasum(*[rows(mx, np, ones).asnumpy() for ones in each])
            np.testing.assert_allclose(weight.asnumpy(), -want, rtol=1e-3)
