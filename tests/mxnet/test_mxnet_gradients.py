"""Autograd through collectives, with Horovod's factors where calls do not say otherwise."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


SIZE = 3


def weighted(hvd, mx, result):
    """A loss whose gradient differs between ranks and elements."""
    with mx.autograd.pause():
        weights = mx.nd.arange(result.size).reshape(result.shape) * (hvd.rank() + 1) + 1
    return (result * weights).sum()


def weights_of(np, rank, shape):
    return np.arange(np.prod(shape)).reshape(shape) * (rank + 1) + 1.0


def gradient_of(mx, function, *arrays, grad_req="write"):
    """Gradients of a loss with respect to arrays; the last one is not a variable itself."""
    for x in arrays:
        x.attach_grad(grad_req=grad_req)
    with mx.autograd.record():
        loss = function(*arrays[:-1], arrays[-1] * 2)
    loss.backward()
    *whole, doubled = [x.grad.asnumpy() for x in arrays]
    return [*whole, doubled / 2]


@pytest.mark.ranks(3)
def test_reductions(hvd, mx, np):
    hvd.init()
    total = sum(weights_of(np, r, (5, 2)) for r in range(SIZE))
    for op, scale in ((hvd.Sum, 1.0), (hvd.Average, 1 / SIZE)):
        for factors in ({}, {"prescale_factor": 0.5, "postscale_factor": 3.0}):
            scale_all = scale * (1.5 if factors else 1.0)

            def loss(x, op=op, factors=factors):
                return weighted(hvd, mx, hvd.allreduce(x, op=op, **factors))

            (got,) = gradient_of(mx, loss, mx.nd.ones((5, 2)))
            np.testing.assert_allclose(got, total * scale_all, rtol=1e-5)

            def scattered(x, op=op, factors=factors):
                return weighted(hvd, mx, hvd.reducescatter(x, op=op, **factors))

            (got,) = gradient_of(mx, scattered, mx.nd.ones((5, 2)))
            rows = [weights_of(np, r, (n, 2)) for r, n in enumerate((2, 2, 1))]
            np.testing.assert_allclose(got, np.concatenate(rows) * scale_all * SIZE, rtol=1e-5)


@pytest.mark.ranks(3)
def test_gathers_broadcasts_and_exchanges(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    (got,) = gradient_of(mx, lambda x: weighted(hvd, mx, hvd.allgather(x)), mx.nd.ones((rank + 1, 2)))
    total = sum(weights_of(np, r, (6, 2)) for r in range(SIZE))
    np.testing.assert_allclose(got, total[(0, 1, 3)[rank] :][: rank + 1] / SIZE, rtol=1e-6)

    (got,) = gradient_of(mx, lambda x: weighted(hvd, mx, hvd.broadcast(x, 1)), mx.nd.ones(4))
    np.testing.assert_allclose(got, sum(weights_of(np, r, 4) for r in range(SIZE)) / SIZE * (rank == 1))

    x = mx.nd.ones((SIZE, 2))
    (got,) = gradient_of(mx, lambda x: weighted(hvd, mx, hvd.alltoall(x)), x)
    want = [weights_of(np, r, (SIZE, 2))[rank : rank + 1] for r in range(SIZE)]
    np.testing.assert_allclose(got, np.concatenate(want))

    # Rank r sends r rows to each, and keeps one that goes nowhere.
    x = mx.nd.ones((SIZE * rank + 1, 2))
    (got,) = gradient_of(mx, lambda x: weighted(hvd, mx, hvd.alltoall(x, splits=[rank] * SIZE)[0]), x)
    first = (0, 0, 1)[rank]
    want = [weights_of(np, r, (3, 2))[first : first + rank] for r in range(SIZE)]
    np.testing.assert_allclose(got, np.concatenate([*want, np.zeros((1, 2))]))


@pytest.mark.ranks(3)
def test_grouped_forms(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    total = sum(weights_of(np, r, 3) for r in range(SIZE))

    def reduced(x, y):
        # Of three results one is not used, and of three arrays one has no gradient.
        a, _, c = hvd.grouped_allreduce([mx.nd.ones(2), x, y], op=hvd.Sum)
        return weighted(hvd, mx, c) + a.sum()

    unused, used = gradient_of(mx, reduced, mx.nd.ones((2, 2)), mx.nd.ones(3))
    np.testing.assert_allclose(used, total)
    np.testing.assert_allclose(unused, np.zeros((2, 2)))

    def gathered(x, y):
        a, b = hvd.grouped_allgather([x, y])
        return weighted(hvd, mx, a) + weighted(hvd, mx, b) * 2

    a, b = gradient_of(mx, gathered, mx.nd.ones(1), mx.nd.ones(rank + 1))
    np.testing.assert_allclose(a, total[rank : rank + 1] / SIZE, rtol=1e-6)
    whole = sum(weights_of(np, r, 6) for r in range(SIZE)) * 2
    np.testing.assert_allclose(b, whole[(0, 1, 3)[rank] :][: rank + 1] / SIZE, rtol=1e-6)

    def scattered(x, y):
        a, b = hvd.grouped_reducescatter([x, y], op=hvd.Sum)
        return weighted(hvd, mx, a) + weighted(hvd, mx, b) * 2

    a, b = gradient_of(mx, scattered, mx.nd.ones(3), mx.nd.ones(6))
    np.testing.assert_allclose(a, [SIZE] * 3)
    np.testing.assert_allclose(b, np.concatenate([weights_of(np, r, 2) for r in range(SIZE)]) * 2 * SIZE)


@pytest.mark.ranks(2)
def test_gradients_that_are_added_up(hvd, mx, np):
    hvd.init()
    x = mx.nd.ones(2)
    x.attach_grad(grad_req="add")
    for _ in range(3):
        with mx.autograd.record():
            loss = hvd.allreduce(x, op=hvd.Sum).sum() * (hvd.rank() + 1) + (x * 10).sum()
        loss.backward()
    assert x.grad.asnumpy().tolist() == [39.0, 39.0]


@pytest.mark.ranks(2)
def test_arrays_of_mx_np(hvd, mx, np):
    hvd.init()
    mx.npx.set_np()
    rank = hvd.rank()
    for shape in ((), (3,), (2, 0)):
        x = mx.np.ones(shape)
        x.attach_grad()
        with mx.autograd.record():
            y = hvd.allreduce(x, op=hvd.Sum)
            assert type(y) is mx.np.ndarray
            loss = (y * (rank + 1)).sum()
        loss.backward()
        np.testing.assert_array_equal(x.grad.asnumpy(), np.full(shape, 3.0, "float32"))
    x = mx.np.ones((2, 2))
    x.attach_grad()
    with mx.autograd.record():
        y, _ = hvd.alltoall(x, splits=[2, 0])  # nothing for rank 1
        loss = (y * 5).sum()
    loss.backward()
    np.testing.assert_array_equal(x.grad.asnumpy(), np.full((2, 2), 5.0, "float32"))


@pytest.mark.ranks(2)
def test_asynchronous_forms_have_gradients(hvd, mx, np):
    hvd.init()
    x = mx.nd.ones(3)
    x.attach_grad()
    with mx.autograd.record():
        handle = hvd.allreduce_async(x, op=hvd.Sum, name="x")
        loss = (hvd.synchronize(handle) * (hvd.rank() + 1)).sum()
    loss.backward()
    assert x.grad.asnumpy().tolist() == [3.0] * 3


@pytest.mark.ranks(2)
def test_a_maximum_has_no_gradient_and_says_so(hvd, mx, np, printed):
    hvd.init()
    x = mx.nd.ones(3)
    x.attach_grad()
    with mx.autograd.record():
        y = hvd.allreduce(x, op=hvd.Max, name="largest")
        loss = (y * 2).sum()
    assert y.asnumpy().tolist() == [1.0] * 3
    loss.backward()
    with pytest.raises(mx.base.MXNetError):
        x.grad.asnumpy()
    assert "allreduce 'largest': op=Max has no gradient" in printed()


@pytest.mark.ranks(2)
def test_many_branches(hvd, mx, np):
    hvd.init()
    # Branches that backward may reach in any order, more than MXNet has threads for custom functions.
    x = mx.nd.ones(4)
    x.attach_grad()
    for _ in range(3):
        with mx.autograd.record():
            parts = [hvd.allreduce(x * i, op=hvd.Sum) * (hvd.rank() + 1) for i in range(60)]
            parts += [hvd.allgather(x * i)[:4] for i in range(40)]
            loss = mx.nd.add_n(*parts).sum()
        loss.backward()
        want = 3.0 * sum(range(60)) + 1.0 * sum(range(40)) * (hvd.rank() == 0)
        assert x.grad.asnumpy().tolist() == [want] * 4


@pytest.mark.ranks(2)
def test_gradients_stay_in_memory_until_they_are_sent(hvd, mx, np):
    hvd.init()
    # The result of the reduction is not needed on rank 1, but its gradient is read until it is done.
    for step in range(30):
        x = mx.nd.ones(50000)
        x.attach_grad()
        with mx.autograd.record():
            loss = (hvd.broadcast(x, 0) * (hvd.rank() + step)).sum()
        loss.backward()
        del loss
        junk = [mx.nd.ones(50000) * -1 for _ in range(5)]  # would take the memory
        grad = x.grad.asnumpy()
        assert grad.tolist() == [(step + 0.5) * (hvd.rank() == 0)] * 50000
        del junk


@pytest.mark.ranks(2)
def test_ranks_without_rows(hvd, mx, np):
    hvd.init()
    mx.npx.set_np()
    rank = hvd.rank()
    for step in range(30):
        x = mx.np.ones((20000 * rank, 2))  # none on rank 0
        x.attach_grad()
        with mx.autograd.record():
            y = hvd.allgather(x)
            z, _ = hvd.alltoall(x, splits=[10000 * rank, 10000 * rank])
            loss = (y * (rank + step)).sum() + (z * (rank + 5)).sum()
        loss.backward()
        del loss, y, z
        junk = [mx.np.ones((20000, 2)) * -1 for _ in range(5)]  # would take the memory
        if rank == 1:
            want = np.full((20000, 2), step + 0.5 + 5)
            want[10000:] += 1
            np.testing.assert_array_equal(x.grad.asnumpy(), want)
        assert x.grad.shape == (20000 * rank, 2)
        del junk
    mx.nd.waitall()


@pytest.mark.ranks(2)
def test_a_loss_over_all_ranks_trains_as_one_process(hvd, mx, np):
    hvd.init()
    # A model whose ranks see one another's batches: equal to one process with the joined batch.
    rank = hvd.rank()
    weight = mx.gluon.Parameter("weight", shape=(4,))
    weight.initialize(mx.init.One())
    trainer = hvd.DistributedTrainer([weight], "sgd", {"learning_rate": 0.1})
    data = np.random.RandomState(0).randn(2, 6, 4).astype("float32")
    alone = mx.nd.ones(4)
    alone.attach_grad()
    for _ in range(5):
        with mx.autograd.record():
            y = (mx.nd.array(data[rank]) * weight.data()).sum(axis=1)
            mean = hvd.allreduce(y.mean())
            loss = ((y - mean) ** 2).mean()
        loss.backward()
        trainer.step(1)
        with mx.autograd.record():
            y = (mx.nd.array(data.reshape(12, 4)) * alone).sum(axis=1)
            loss = ((y - y.mean()) ** 2).mean()
        loss.backward()
        alone -= 0.1 * alone.grad
    np.testing.assert_allclose(weight.data().asnumpy(), alone.asnumpy(), rtol=1e-5)


@pytest.mark.ranks(3)
def test_a_hybridized_block_gets_gradients_through_collectives(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    net = mx.gluon.nn.Dense(1, use_bias=False, in_units=1, weight_initializer=mx.init.One())
    net.initialize()
    net.hybridize()
    x = mx.nd.array([[rank + 1.0]] * (rank + 1))  # uneven rows
    verbs = {
        "allgather": lambda z, exact: hvd.allgather(z, exact_gradient=exact),
        "grouped": lambda z, exact: hvd.grouped_allgather([z], exact_gradient=exact)[0],
        "broadcast": lambda z, exact: hvd.broadcast(z.sum(), 1, exact_gradient=exact),
        "reducescatter": lambda z, exact: hvd.reducescatter(
            z.sum().reshape((1,)).tile(3), op=hvd.Sum, exact_gradient=exact
        ),
    }
    for name, verb in verbs.items():
        for exact in (True, False, None):
            for _ in range(2):
                with mx.autograd.record():
                    loss = (verb(net(x), exact) * (rank + 1)).sum()
                loss.backward()
            # The sum of all ranks' weights is 6, that of a rank's samples (rank + 1)^2.
            wanted = 6.0 * (rank + 1) ** 2 * (name != "broadcast" or rank == 1)
            if not exact:
                wanted = wanted * SIZE if name == "reducescatter" else wanted / SIZE
            assert net.weight.grad().asscalar() == wanted, (name, exact)


@pytest.mark.ranks(1)
def test_between_convolutions(hvd, mx, np):
    hvd.init()
    verbs = {
        "allreduce": hvd.allreduce,
        "grouped": lambda x: hvd.grouped_allreduce([x, x])[1],
        "allgather": hvd.allgather,
        "broadcast": lambda x: hvd.broadcast(x, 0),
        "alltoall": hvd.alltoall,
        "reducescatter": hvd.reducescatter,
    }
    x = mx.nd.array(np.random.RandomState(0).randn(4, 3, 16, 16))
    x.attach_grad()
    # In a world of one, all of them give what they get; convolutions of many channels use other layouts.
    expected = None
    for name, verb in {"none": lambda x: x * 1, **verbs}.items():
        convolutions = [
            mx.gluon.nn.Conv2D(n, 3, padding=1, in_channels=c) for c, n in ((3, 64), (64, 64), (64, 8))
        ]
        mx.random.seed(1)
        for convolution in convolutions:
            convolution.initialize(mx.init.Xavier())
        for _ in range(3):
            with mx.autograd.record():
                a, b, c = convolutions
                loss = (c(verb(b(verb(a(x))))) ** 2).sum()
            loss.backward()
        found = [x.grad.asnumpy(), *[conv.weight.grad().asnumpy() for conv in convolutions]]
        expected = expected or found
        for got, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max(), err_msg=name)


def rewire(hvd):
    """Begin another world; how many operations it has had."""
    hvd.shutdown()
    hvd.init()
    hvd.barrier()
    return hvd.counters()["operations"]


@pytest.mark.ranks(2)
def test_a_gradient_of_a_world_that_has_ended_is_lost(hvd, mx, np):
    hvd.init()
    layer = hvd.SyncBatchNorm(in_channels=1)
    layer.initialize()
    calls = {
        "allreduce": lambda x: hvd.allreduce(x, name="x"),
        "no name": lambda x: hvd.allreduce(x),
        "allgather": lambda x: hvd.allgather(x, name="x"),
        "broadcast": lambda x: hvd.broadcast(x, 0, name="x"),
        "alltoall": lambda x: hvd.alltoall(x, name="x"),
        "reducescatter": lambda x: hvd.reducescatter(x, name="x"),
        "batch norm": layer,
    }
    for kind, call in calls.items():
        x = mx.nd.array([[1.0], [2.0]]) * (hvd.rank() + 1)
        x.attach_grad()
        with mx.autograd.record():
            y = call(x)
            loss = (y * y).sum()
        loss.wait_to_read()
        before = rewire(hvd)
        loss.backward()
        with pytest.raises(hvd.PeerLostError, match="which has ended"):
            x.grad.asnumpy()
        assert hvd.counters()["operations"] == before, kind
        with mx.autograd.record():
            y = call(x)
            loss = (y * y).sum()
        loss.backward()
        assert x.grad.asnumpy().shape == (2, 1), kind


@pytest.mark.ranks(2)
def test_a_gradient_that_nobody_has_read_leaves_the_new_world_alone(hvd, mx, np):
    hvd.init()
    x = mx.nd.ones(4) * (hvd.rank() + 1)
    x.attach_grad()
    with mx.autograd.record():
        loss = (hvd.allreduce(x, op=hvd.Sum, name="x") * 3).sum()
    rewire(hvd)
    loss.backward()  # nobody reads the gradient
    parameter = mx.gluon.Parameter("p", shape=(3,), init=mx.init.One())
    parameter.initialize()
    trainer = hvd.DistributedTrainer([parameter], "sgd", {"learning_rate": 0.5})
    rewire(hvd)
    for _ in range(2):
        with mx.autograd.record():
            loss = (parameter.data() * (hvd.rank() + 1)).sum()
        loss.backward()
        trainer.step(1)
    assert parameter.data().asnumpy().tolist() == [1.0 - 2 * 0.5 * 1.5] * 3
    assert hvd.allreduce(mx.nd.ones(2), op=hvd.Sum).asnumpy().tolist() == [2.0, 2.0]
