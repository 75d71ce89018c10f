"""SyncBatchNorm over n ranks is Gluon's BatchNorm of one process with the joined batch."""

from __future__ import annotations

import pytest
from mxnet_models import assert_same_bits_on_all_ranks, fill

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


SAMPLES = (4, 7, 1)  # of each rank
HYBRID = (None, {}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True})


def samples(np, step, ranks, shape=(3, 5, 4), mean=4.0):
    """What some ranks have in a step; each has other moments."""
    parts = [
        np.random.RandomState(100 * step + r).randn(SAMPLES[r], *shape) * (r + 1) + mean + r for r in ranks
    ]
    return np.concatenate(parts).astype("float32")


def network(mx, np, layer, **options):
    net = mx.gluon.nn.HybridSequential()
    net.add(
        mx.gluon.nn.Conv2D(32, 3, in_channels=3),  # so many channels that layouts of oneDNN are used
        layer(in_channels=32, **options),
        mx.gluon.nn.Activation("tanh"),
        mx.gluon.nn.Conv2D(16, 1, in_channels=32),
        layer(in_channels=16, **options),
    )
    net.initialize()
    fill(mx, np, net, 3)
    if not options.get("scale", True):
        for number in (1, 4):  # BatchNorm writes this itself
            net[number].gamma.set_data(mx.nd.ones_like(net[number].gamma.data()))
    return net


def weighted(mx, y, number, step):
    """A loss that tells samples, channels and places apart."""
    with mx.autograd.pause():
        factor = mx.nd.sin(mx.nd.arange(number * y[0].size, (number + y.shape[0]) * y[0].size) + step)
    return (y.astype("float32") * factor.reshape(y.shape)).sum()


def results(mx, net, xs, first):
    """Outputs and gradients with respect to the input of some training steps, then what the net holds."""
    found = []
    for step, value in enumerate(xs):
        x = mx.nd.array(value)
        x.attach_grad()
        with mx.autograd.record():
            y = net(x)
            loss = weighted(mx, y, first, step)
        loss.backward()
        found.append((y.asnumpy(), x.grad.asnumpy()))
    parameters = net.collect_params().values()
    gradients = [p.grad().asnumpy() for p in parameters if p.grad_req != "null"]
    return found, gradients, [p.data().asnumpy() for p in parameters]


@pytest.mark.every_size
@pytest.mark.ranks(2, 3)
def test_outputs_gradients_and_statistics_equal_the_joined_batch(hvd, mx, np):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    begin = sum(SAMPLES[:rank])
    mine = slice(begin, begin + SAMPLES[rank])
    for options in ({}, {"center": False}, {"scale": False}, {"momentum": 0.5, "epsilon": 1e-2}):
        alone = network(mx, np, mx.gluon.nn.BatchNorm, **options)
        joined = [samples(np, step, range(size)) for step in range(3)]
        expected, expected_gradients, held = results(mx, alone, joined, 0)
        for hybrid in HYBRID[-1:] if options else HYBRID:
            net = network(mx, np, hvd.SyncBatchNorm, **options)
            if hybrid is not None:
                net.hybridize(**hybrid)
            got, gradients, parameters = results(
                mx, net, [samples(np, step, [rank]) for step in range(3)], begin
            )
            for (y, dx), (want_y, want_dx) in zip(got, expected, strict=True):
                np.testing.assert_allclose(y, want_y[mine], rtol=1e-4, atol=1e-5)
                np.testing.assert_allclose(dx, want_dx[mine], rtol=1e-3, atol=1e-4)
            for one, want in zip(gradients, expected_gradients, strict=True):
                total = hvd.allreduce(mx.nd.array(one), op=hvd.Sum).asnumpy()
                np.testing.assert_allclose(total, want, rtol=1e-3, atol=1e-3)
            for one, want in zip(parameters, held, strict=True):  # moving statistics among them
                np.testing.assert_allclose(one, want, rtol=1e-5, atol=1e-6)
            assert_same_bits_on_all_ranks(hvd, parameters)
            # Not in training: the moving statistics, and no collective.
            before = hvd.counters()["operations"]
            x = mx.nd.array(samples(np, 9, [rank]))
            np.testing.assert_allclose(net(x).asnumpy(), alone(x).asnumpy(), rtol=1e-4, atol=1e-5)
            assert hvd.counters()["operations"] == before


@pytest.mark.ranks(2)
def test_one_collective_in_forward_and_one_in_backward(hvd, mx, np):
    hvd.init()
    layer = hvd.SyncBatchNorm(in_channels=3)
    layer.initialize()
    x = mx.nd.array(samples(np, 0, [hvd.rank()]))
    before = hvd.counters()["operations"]
    with mx.autograd.record():
        loss = weighted(mx, layer(x), 0, 0)
    loss.wait_to_read()
    assert hvd.counters()["operations"] == before + 1
    loss.backward()
    mx.nd.waitall()
    assert hvd.counters()["operations"] == before + 2
    # A loss of statistics that do not move needs none, forward or backward.
    fixed = hvd.SyncBatchNorm(in_channels=3, use_global_stats=True)
    plain = mx.gluon.nn.BatchNorm(in_channels=3, use_global_stats=True)
    found = []
    for block in (fixed, plain):
        block.initialize()
        fill(mx, np, block, 5)
        block.running_var.set_data(mx.nd.array([1, 2, 3]))
        x.attach_grad()
        with mx.autograd.record():
            y = block(x)
            loss = weighted(mx, y, 0, 0)
        loss.backward()
        found.append([y, x.grad.copy(), block.gamma.grad(), block.beta.grad()])
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), rtol=1e-3, atol=1e-4)
    assert hvd.counters()["operations"] == before + 2


@pytest.mark.ranks(2)
def test_statistics_of_float16_are_float32_and_far_from_zero_they_are_exact(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    net = hvd.SyncBatchNorm(in_channels=3)
    net.initialize()
    net.cast("float16")
    assert {p.dtype for p in net.collect_params().values()} <= {"float32", np.float32}
    x = mx.nd.array(samples(np, 0, [rank], mean=300.0), dtype="float16")
    x.attach_grad()
    with mx.autograd.record():
        y = net(x)
        loss = weighted(mx, y, 0, 0)
    loss.backward()
    assert y.dtype == x.grad.dtype == np.float16
    joined = np.concatenate(hvd.allgather_object(x.asnumpy())).astype("float64")
    mean, variance = joined.mean(axis=(0, 2, 3)), joined.var(axis=(0, 2, 3))
    want = (x.asnumpy() - mean[:, None, None]) / np.sqrt(variance + 1e-5)[:, None, None]
    np.testing.assert_allclose(y.asnumpy(), want, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(net.running_mean.data().asnumpy(), mean * 0.1, rtol=1e-6)
    np.testing.assert_allclose(net.running_var.data().asnumpy(), 0.9 + variance * 0.1, rtol=1e-5)
    # Far from zero, sums of squares in float32 would have no digit left.
    far = hvd.SyncBatchNorm(in_channels=3, axis=-1)
    far.initialize()
    x = np.random.RandomState(rank).randn(50, 3) + 1e4
    with mx.autograd.record():
        far(mx.nd.array(x)).wait_to_read()
    joined = np.concatenate(hvd.allgather_object(x.astype("float32"))).astype("float64")
    np.testing.assert_allclose(far.running_var.data().asnumpy(), 0.9 + 0.1 * joined.var(axis=0), rtol=1e-5)


@pytest.mark.ranks(2)
def test_a_layer_used_twice_and_deferred_channels(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    found = []
    for layer, members in ((hvd.SyncBatchNorm, [rank]), (mx.gluon.nn.BatchNorm, [0, 1])):
        twice = layer()  # used at two places, its channels not known yet
        net = mx.gluon.nn.HybridSequential()
        net.add(mx.gluon.nn.Conv2D(4, 1), twice, mx.gluon.nn.Conv2D(4, 1), twice)
        mx.random.seed(7)
        net.initialize(mx.init.Normal(0.5))
        net.hybridize(static_alloc=True)
        xs = [samples(np, step, members) for step in range(2)]
        found.append(results(mx, net, xs, sum(SAMPLES[:rank]) if len(members) == 1 else 0)[0])
    mine = slice(sum(SAMPLES[:rank]), sum(SAMPLES[: rank + 1]))
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got[0], want[0][mine], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(got[1], want[1][mine], rtol=1e-3, atol=1e-3)
    # Branches that MXNet's engine may run in any order.
    a, b, layer = *(mx.nd.ones((4, 3)) * (rank + 1) * f for f in (1, 10)), hvd.SyncBatchNorm()
    layer.initialize()
    for _ in range(20):
        with mx.autograd.record():
            layer(a)
            layer(b)
    mean = 0.0
    for _ in range(20):
        mean = (mean * 0.9 + 0.15) * 0.9 + 1.5
    np.testing.assert_allclose(layer.running_mean.data().asnumpy(), [mean] * 3, rtol=1e-5)


@pytest.mark.ranks(2)
def test_a_converted_network_trains_as_on_the_joined_batch(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()

    def train(net, trainer, members, begin):
        for step in range(10):
            x = mx.nd.array(samples(np, step, members))
            with mx.autograd.record():
                loss = weighted(mx, net(x), begin, step)
            loss.backward()
            trainer.step(sum(SAMPLES[:2]) / (2 if len(members) == 1 else 1))
        return [p.data().asnumpy() for p in net.collect_params().values()]

    options = {"learning_rate": 0.05, "momentum": 0.9}
    net = hvd.SyncBatchNorm.convert(network(mx, np, mx.gluon.nn.BatchNorm))
    assert sum(type(child) is hvd.SyncBatchNorm for child in net) == 2
    net.hybridize()
    mine = train(
        net, hvd.DistributedTrainer(net.collect_params(), "sgd", options), [rank], sum(SAMPLES[:rank])
    )
    alone = network(mx, np, mx.gluon.nn.BatchNorm)
    joined = train(alone, mx.gluon.Trainer(alone.collect_params(), "sgd", options), [0, 1], 0)
    for got, want in zip(mine, joined, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    assert_same_bits_on_all_ranks(hvd, mine)


@pytest.mark.ranks(2)
def test_arrays_of_mx_np(hvd, mx, np):
    hvd.init()
    mx.npx.set_np()
    for hybrid in HYBRID:
        layer = hvd.SyncBatchNorm()
        layer.initialize()
        if hybrid is not None:
            layer.hybridize(**hybrid)
        x = mx.np.array(samples(np, 0, [hvd.rank()]))
        x.attach_grad()
        with mx.autograd.record():
            y = layer(x)
            loss = (y * y * y).sum()
        loss.backward()
        assert type(y) is mx.np.ndarray
        joined = np.concatenate(hvd.allgather_object(x.asnumpy()))
        mean, deviation = joined.mean(axis=(0, 2, 3)), joined.std(axis=(0, 2, 3))
        want = (x.asnumpy() - mean[:, None, None]) / deviation[:, None, None]
        np.testing.assert_allclose(y.asnumpy(), want, rtol=1e-3, atol=1e-4)
        assert np.abs(x.grad.asnumpy()).max() > 0.1


@pytest.mark.ranks(2)
def test_a_rank_without_samples_adds_none(hvd, mx, np):
    """Rank 0 has no samples; then nobody has; then ranks with another past make their models anew."""
    hvd.init()
    joined = samples(np, 0, [1])
    with mx.util.np_shape(True):
        layer, alone = hvd.SyncBatchNorm(in_channels=3), mx.gluon.nn.BatchNorm(in_channels=3)
        found = []
        for block, value in ((layer, joined if hvd.rank() else joined[:0]), (alone, joined)):
            block.initialize()
            x = mx.nd.array(value) if len(value) else mx.nd.zeros(value.shape)
            x.attach_grad()
            with mx.autograd.record():
                y = block(x)
                loss = (y * y * y).sum()
            loss.backward()
            found.append([y, x.grad, block.gamma.grad(), block.running_mean.data(), block.running_var.data()])
        moving = [value.asnumpy() for value in found[0][3:]]
        for got, want in zip(*found, strict=True):
            if hvd.rank() == 1 or got.shape == found[0][3].shape:
                total = hvd.allreduce(got, op=hvd.Sum) if got is found[0][2] else got
                np.testing.assert_allclose(total.asnumpy(), want.asnumpy(), rtol=1e-3, atol=1e-4)
        assert found[0][0].shape == (len(joined) * hvd.rank(), *joined.shape[1:])
        assert_same_bits_on_all_ranks(hvd, moving)
        with mx.autograd.record():
            loss = layer(mx.nd.zeros(joined[:0].shape)).sum()
        loss.backward()
        mx.nd.waitall()
        np.testing.assert_array_equal(layer.running_mean.data().asnumpy(), moving[0])


@pytest.mark.ranks(2)
def test_ranks_with_another_past_meet_after_init(hvd, mx, np):
    def train():
        layer = hvd.SyncBatchNorm(in_channels=2)
        layer.initialize()
        layer.hybridize()
        with mx.autograd.record():
            loss = layer(mx.nd.array([[hvd.rank(), 2.0], [4.0, 6.0]])).sum()
        loss.backward()
        mx.nd.waitall()
        np.testing.assert_allclose(layer.running_mean.data().asnumpy(), [0.225, 0.4], rtol=1e-6)

    hvd.init()
    if hvd.rank() == 0:  # as one that has been in the job before the other one came
        layer = hvd.SyncBatchNorm(in_channels=2)
        layer.initialize()
        layer.hybridize()
        layer(mx.nd.ones((2, 2))).wait_to_read()
        del layer
    hvd.shutdown()
    hvd.init()
    train()


@pytest.mark.ranks(3, initialized=False)
def test_process_sets(hvd, mx, np):
    pair = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[pair])
    layer = hvd.SyncBatchNorm(in_channels=2, process_set=pair)
    layer.initialize()
    x = mx.nd.ones((3, 2)) * hvd.rank()
    if pair.included():
        with mx.autograd.record():
            layer(x)
        np.testing.assert_allclose(layer.running_mean.data().asnumpy(), [0.1, 0.1], rtol=1e-6)
    else:
        with mx.autograd.record(), pytest.raises(hvd.InvalidArgumentError, match="rank 1 is not in"):
            layer(x)
        layer(x).wait_to_read()  # not in training anyone may
    hvd.shutdown()
    with mx.autograd.record(), pytest.raises(ValueError, match="init"):
        layer(x)


@pytest.mark.ranks(2)
def test_a_rank_that_has_joined_adds_no_samples(hvd, mx, np):
    hvd.init()
    layer = hvd.SyncBatchNorm(in_channels=2)
    layer.initialize()
    for step in range(3 - hvd.rank()):  # rank 1 has one batch less, and then two
        with mx.autograd.record():
            y = layer(mx.nd.ones((2, 2)) * (step + 1))
            loss = y.sum()
        loss.backward()
    hvd.join()
    if hvd.rank() == 0:
        expected = ((0.1 * 0.9) + 0.2) * 0.9 + 0.3
        np.testing.assert_allclose(layer.running_mean.data().asnumpy(), [expected] * 2, rtol=1e-5)


@pytest.mark.ranks(2, env={"MXNET_ENGINE_TYPE": "NaiveEngine"})
def test_with_the_naive_engine(hvd, mx, np):
    test_outputs_gradients_and_statistics_equal_the_joined_batch(hvd, mx, np)


@pytest.mark.ranks(1)
def test_parameters_are_those_of_batch_norm(hvd, mx, np, tmp_path):
    hvd.init()
    path = str(tmp_path / "parameters")
    net = network(mx, np, hvd.SyncBatchNorm)
    results(mx, net, [samples(np, 0, [0])], 0)
    net.save_parameters(path)
    plain = network(mx, np, mx.gluon.nn.BatchNorm)
    plain.load_parameters(path)
    x = mx.nd.array(samples(np, 1, [0]))
    np.testing.assert_allclose(net(x).asnumpy(), plain(x).asnumpy(), rtol=1e-4, atol=1e-5)
    assert hvd.SyncBatchNorm(prefix=None).gamma.name.startswith("batchnorm")
    assert "SyncBatchNorm(" in repr(net)
