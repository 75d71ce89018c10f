"""What users of MXNet combine with a trainer: mx.np, NaiveEngine, casts, shared weights, optimizers."""

from __future__ import annotations

import pytest
from mxnet_models import (
    BATCH,
    assert_same_bits_on_all_ranks,
    batch,
    convolutional,
    elementwise,
    train,
    weights,
)

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


SGD = {"learning_rate": 0.1, "momentum": 0.9}


@pytest.mark.ranks(2)
def test_training_with_arrays_of_mx_np(hvd, mx, np):
    hvd.init()
    mx.npx.set_np()
    rank, size = hvd.rank(), hvd.size()

    def network():
        net = mx.gluon.nn.HybridSequential()
        net.add(mx.gluon.nn.Dense(8, in_units=6, activation="relu"), mx.gluon.nn.Dense(3, in_units=8))
        net.initialize()
        for i, parameter in enumerate(net.collect_params().values()):
            random = np.random.RandomState(i)
            parameter.set_data(mx.np.array(random.randn(*parameter.shape), dtype="float32"))
        return net

    def run(net, trainer, members):
        for step in range(10):
            x = np.concatenate([np.random.RandomState(10 * step + r).randn(4, 6) for r in members])
            with mx.autograd.record():
                y = net(mx.np.array(x, dtype="float32"))
                assert type(y) is mx.np.ndarray
                loss = (y * y).mean(axis=1)
            loss.backward()
            trainer.step(len(x))
        return weights(np, net)

    alone = network()
    expected = run(alone, mx.gluon.Trainer(alone.collect_params(), "adam", kvstore=None), range(size))
    for hybrid in (None, {}, {"static_alloc": True, "static_shape": True}):
        for options in ({}, {"num_groups": 2}, {"backward_passes_per_step": 1, "groups": 1}):
            net = network()
            if hybrid is not None:
                net.hybridize(**hybrid)
            if rank:
                for parameter in net.collect_params().values():
                    parameter.data()[()] = rank
            hvd.broadcast_parameters(net.collect_params())
            trainer = hvd.DistributedTrainer(net.collect_params(), "adam", **options)
            got = run(net, trainer, [rank])
            for one, want in zip(got, expected, strict=True):
                np.testing.assert_allclose(one, want, rtol=1e-3, atol=1e-4)
            assert_same_bits_on_all_ranks(hvd, got)
            hvd.broadcast_optimizer_state(trainer)
    # Passes that add up, a parameter that a rank has not used, and one that stays local.
    nets = [mx.gluon.nn.Dense(1, in_units=1, use_bias=False) for _ in range(3)]
    for net in nets:
        net.initialize(mx.init.One())
    trainer = hvd.DistributedTrainer(
        [net.weight for net in nets], "sgd", {"learning_rate": 1.0}, backward_passes_per_step=2
    )
    trainer.register_local_var(nets[2].weight)
    for _ in range(2):
        with mx.autograd.record():
            used = nets if rank == 0 else nets[1:]
            loss = sum(net(mx.np.ones((1, 1)) * (rank + 1)) for net in used)
        loss.backward()
        trainer.step(1, ignore_stale_grad=True)
    got = [float(net.weight.data()) for net in nets]
    assert got == [1 - 2 / 2, 1 - 2 * 3 / 2, 1 - 2 * (rank + 1) / 2]


def numpy_operations(hvd, mx, np):
    hvd.init()
    mx.npx.set_np()
    rank, size = hvd.rank(), hvd.size()
    x = mx.np.arange(6, dtype="float32").reshape(3, 2) * (rank + 1)
    plain = np.arange(6, dtype="float32").reshape(3, 2)
    factor = sum(range(1, size + 1))
    cases = {
        "allreduce": (hvd.allreduce(x, op=hvd.Sum), plain * factor),
        "allreduce_": (hvd.allreduce_(x.copy(), op=hvd.Max), plain * size),
        "grouped": (hvd.grouped_allreduce([x, x], op=hvd.Sum)[1], plain * factor),
        "grouped_": (hvd.grouped_allreduce_([x.copy()], op=hvd.Sum)[0], plain * factor),
        "allgather": (hvd.allgather(x), np.concatenate([plain * (r + 1) for r in range(size)])),
        "gathered": (hvd.grouped_allgather([x])[0], np.concatenate([plain * (r + 1) for r in range(size)])),
        "broadcast": (hvd.broadcast(x, 1), plain * 2),
        "broadcast_": (hvd.broadcast_(x.copy(), 1), plain * 2),
        "scattered": (hvd.reducescatter(x, op=hvd.Sum), (plain * factor)[: 2 - rank] if rank == 0 else None),
        "async": (hvd.synchronize(hvd.allreduce_async(x, op=hvd.Sum)), plain * factor),
        "scalar": (hvd.allreduce(mx.np.array(2.0 * rank)), np.float32(1.0)),
        "mask": (hvd.allreduce(x > 3, op=hvd.Min), plain > 3),
    }
    for name, (got, want) in cases.items():
        assert type(got) is mx.np.ndarray, name
        if want is not None:
            np.testing.assert_array_equal(got.asnumpy(), want, name)
    rows, received = hvd.alltoall(x, splits=[1, 2])
    assert type(rows) is type(received) is mx.np.ndarray
    assert received.tolist() == ([1, 1] if rank == 0 else [2, 2])
    parameters = {"a": x.copy()}
    hvd.broadcast_parameters(parameters, root_rank=1)
    np.testing.assert_array_equal(parameters["a"].asnumpy(), plain * 2)


@pytest.mark.ranks(2)
def test_operations_on_arrays_of_mx_np(hvd, mx, np):
    numpy_operations(hvd, mx, np)


@pytest.mark.ranks(2, env={"MXNET_ENGINE_TYPE": "NaiveEngine"})
def test_everything_with_the_naive_engine(hvd, mx, np):
    hvd.init()
    numpy_operations(hvd, mx, np)
    mx.npx.reset_np()
    rank = hvd.rank()
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Embedding(10, 4, sparse_grad=True), mx.gluon.nn.Dense(3))
    net.hybridize()
    net.initialize(mx.init.Normal(1.0 + rank))
    hvd.broadcast_parameters(net.collect_params())
    words = mx.nd.array([[rank, 3]])
    net(words)
    trainer = hvd.DistributedTrainer(net.collect_params(), "adam", backward_passes_per_step=2)
    for _ in range(4):
        with mx.autograd.record():
            loss = hvd.allreduce(net(words)).sum()
        loss.backward()
        trainer.step(1)
    hvd.broadcast_optimizer_state(trainer)
    assert_same_bits_on_all_ranks(hvd, weights(np, net))


@pytest.mark.ranks(2)
def test_any_optimizer_and_scheduler(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    for name, options in {
        "sgd": {"momentum": 0.9, "wd": 1e-3, "clip_gradient": 0.5},
        "nag": {"momentum": 0.9},
        "adam": {},
        "lamb": {},
        "lars": {"momentum": 0.9},
        "adagrad": {},
        "rmsprop": {"centered": True},
        "ftml": {},
        "signum": {},
        "dcasgd": {},
    }.items():
        found = []
        for members, make in (
            ([rank], hvd.DistributedTrainer),
            ([0, 1], lambda *arguments: mx.gluon.Trainer(*arguments, kvstore=None)),
        ):
            net = convolutional(mx, np)
            scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5)
            both = {"learning_rate": 0.02, "lr_scheduler": scheduler}
            trainer = make(net.collect_params(), name, {**options, **both})
            train(mx, np, net, trainer, members, 4)
            found.append(weights(np, net))
            assert trainer.learning_rate == 0.02 * 0.5
        for got, want in zip(*found, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-3, err_msg=name)
        assert_same_bits_on_all_ranks(hvd, found[0])


@pytest.mark.ranks(2)
def test_float16_with_a_master_copy(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    for name, options in (("sgd", {"momentum": 0.9}), ("adam", {}), ("nag", {"momentum": 0.9})):
        found = []
        for members, make in (
            ([rank], hvd.DistributedTrainer),
            ([0, 1], lambda *arguments: mx.gluon.Trainer(*arguments, kvstore=None)),
        ):
            net = elementwise(mx, "float16")
            net.hybridize()
            trainer = make(net.collect_params(), name, {**options, "multi_precision": True})
            trainer.set_learning_rate(0.05)
            for step in range(5):
                losses = []
                with mx.autograd.record():
                    for member in members:
                        x = np.random.RandomState(10 * step + member).randn(4, 3)
                        losses.append((net(mx.nd.array(x, dtype="float16")) ** 2).sum())
                    loss = sum(losses)
                loss.backward()
                trainer.step(len(members))
            assert trainer.learning_rate == 0.05
            found.append(weights(np, net))
            assert found[-1][0].dtype == np.float16
        for got, want in zip(*found, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2)
        assert_same_bits_on_all_ranks(hvd, found[0])


@pytest.mark.ranks(2)
def test_parameters_that_layers_share(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    found = []
    for members, make in (
        ([rank], hvd.DistributedTrainer),
        ([0, 1], lambda *arguments: mx.gluon.Trainer(*arguments, kvstore=None)),
    ):
        first = mx.gluon.nn.Dense(4, in_units=4)
        second = mx.gluon.nn.Dense(4, in_units=4, params=first.params)
        net = mx.gluon.nn.HybridSequential()
        net.add(first, mx.gluon.nn.Activation("tanh"), second)
        mx.random.seed(5)
        net.initialize(mx.init.Normal(0.5))
        assert len(net.collect_params().values()) == 2
        net.hybridize()
        trainer = make(net.collect_params(), "sgd", SGD)
        for step in range(5):
            x = np.concatenate([np.random.RandomState(10 * step + r).randn(BATCH, 4) for r in members])
            with mx.autograd.record():
                loss = (net(mx.nd.array(x)) ** 2).sum(axis=1)
            loss.backward()
            trainer.step(len(x))
        found.append(weights(np, net))
    for got, want in zip(*found, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert_same_bits_on_all_ranks(hvd, found[0])


@pytest.mark.ranks(2)
def test_frozen_and_unused_parameters(hvd, mx, np):
    hvd.init()
    net = convolutional(mx, np)
    idle = mx.gluon.nn.Dense(2, in_units=2)
    idle.initialize()
    parameters = [*net.collect_params().values(), *idle.collect_params().values()]
    parameters[0].grad_req = "null"
    trainer = hvd.DistributedTrainer(parameters, "sgd", SGD)
    before = [p.data().asnumpy() for p in parameters]
    loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(3):
        x, y = batch(mx, np, step, [hvd.rank()])
        with mx.autograd.record():
            loss = loss_function(net(x), y)
        loss.backward()
        if step == 0:
            with pytest.raises(UserWarning, match="has not been updated"):
                trainer.step(BATCH)
        else:
            trainer.step(BATCH, ignore_stale_grad=True)
    after = [p.data().asnumpy() for p in parameters]
    for position, (a, b) in enumerate(zip(before, after, strict=True)):
        assert (a == b).all() == (position == 0 or position >= len(weights(np, net)))
    assert_same_bits_on_all_ranks(hvd, after)
