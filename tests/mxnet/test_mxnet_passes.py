"""Several backward passes in a step, parameters that not every rank uses, and those that stay local."""

from __future__ import annotations

import pytest
from mxnet_models import (
    BATCH,
    assert_same_bits_on_all_ranks,
    batch,
    convolutional,
    weights,
)

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


PASSES = 3
STEPS = 4
SGD = {"learning_rate": 0.1, "momentum": 0.9}


def accumulate(hvd, mx, np, net, trainer, zero=False, halves=False):
    """Steps of several passes on this rank's samples."""
    loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for turn in range(PASSES * STEPS):
        x, y = batch(mx, np, turn, [hvd.rank()])
        with mx.autograd.record():
            loss = loss_function(net(x), y)
        loss.backward()
        before = weights(np, net)
        if halves:
            trainer.allreduce_grads()
            trainer.update(len(x))
        else:
            trainer.step(len(x))
        moved = any((a != b).any() for a, b in zip(before, weights(np, net), strict=True))
        assert moved == (turn % PASSES == PASSES - 1)
        if zero and moved:
            net.collect_params().zero_grad()


def alone(hvd, mx, np, divisor):
    """One process, one pass over what all ranks have in all passes of a step."""
    net = convolutional(mx, np)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", dict(SGD), kvstore=None)
    loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(STEPS):
        parts = [batch(mx, np, PASSES * step + i, range(hvd.size())) for i in range(PASSES)]
        x, y = (mx.nd.concat(*arrays, dim=0) for arrays in zip(*parts, strict=True))
        with mx.autograd.record():
            loss = loss_function(net(x), y)
        loss.backward()
        trainer.step(len(x) / divisor)
    return weights(np, net)


@pytest.mark.ranks(2)
def test_passes_add_up_to_one_process_with_the_joined_batch(hvd, mx, np):
    hvd.init()
    expected = alone(hvd, mx, np, PASSES)
    averaged = alone(hvd, mx, np, 1)
    for grad_req in ("write", "add"):
        for average in (False, True):
            for options in ({}, {"num_groups": 2}, {"halves": True}):
                net = convolutional(mx, np)
                net.collect_params().setattr("grad_req", grad_req)
                net.hybridize(static_alloc=True)
                halves = options.pop("halves", False)
                trainer = hvd.DistributedTrainer(
                    net.collect_params(),
                    "sgd",
                    SGD,
                    backward_passes_per_step=PASSES,
                    average_aggregated_gradients=average,
                    **options,
                )
                accumulate(hvd, mx, np, net, trainer, zero=grad_req == "add", halves=halves)
                for got, want in zip(weights(np, net), averaged if average else expected, strict=True):
                    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
                assert_same_bits_on_all_ranks(hvd, weights(np, net))
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(hvd.InvalidArgumentError, match="backward_passes_per_step"):
            hvd.DistributedTrainer(net.collect_params(), "sgd", backward_passes_per_step=wrong)
        with pytest.raises(hvd.InvalidArgumentError, match="backward_passes_per_step"):
            hvd.DistributedOptimizer(mx.optimizer.SGD(), backward_passes_per_step=wrong)


@pytest.mark.ranks(1)
def test_passes_of_a_single_rank(hvd, mx, np):
    hvd.init()
    net = convolutional(mx, np)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD, backward_passes_per_step=PASSES)
    accumulate(hvd, mx, np, net, trainer)
    for got, want in zip(weights(np, net), alone(hvd, mx, np, PASSES), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(2)
def test_passes_of_the_optimizer(hvd, mx, np):
    hvd.init()
    shapes = [(3, 2), (4,), (2, 2), (5,), (1,)]
    for make in (lambda: mx.optimizer.SGD(**SGD), lambda: mx.optimizer.Adam()):
        for average in (False, True):
            for options in ({}, {"num_groups": 2}):
                wrapper = hvd.DistributedOptimizer(
                    make(),
                    backward_passes_per_step=PASSES,
                    average_aggregated_gradients=average,
                    **options,
                )
                update, plain = mx.optimizer.get_updater(wrapper), mx.optimizer.get_updater(make())
                mine, expected = [mx.nd.ones(s) for s in shapes], [mx.nd.ones(s) for s in shapes]
                keys = list(range(len(shapes)))
                for step in range(STEPS):
                    total = [np.zeros(s) for s in shapes]
                    for number in range(PASSES):
                        random = np.random.RandomState(10 * step + number)
                        every = [random.randn(2, *s) for s in shapes]
                        total = [t + e.mean(axis=0) for t, e in zip(total, every, strict=True)]
                        gradients = [mx.nd.array(e[hvd.rank()]) for e in every]
                        before = [w.asnumpy() for w in mine]
                        update(keys, gradients, mine)
                        moved = any((a.asnumpy() != b).any() for a, b in zip(mine, before, strict=True))
                        assert moved == (number == PASSES - 1)
                    divisor = PASSES if average else 1
                    plain(keys, [mx.nd.array(t / divisor) for t in total], expected)
                assert wrapper.num_update == STEPS
                for got, want in zip(mine, expected, strict=True):
                    np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), rtol=1e-4, atol=1e-5)
                assert_same_bits_on_all_ranks(hvd, [a.asnumpy() for a in mine])


@pytest.mark.ranks(2)
def test_passes_of_row_sparse_gradients(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    for as_dense in (False, True):
        embedding = mx.gluon.nn.Embedding(10, 2, sparse_grad=True)
        embedding.initialize(mx.init.Zero())
        trainer = hvd.DistributedTrainer(
            embedding.collect_params(),
            "sgd",
            {"learning_rate": 1.0},
            backward_passes_per_step=2,
            sparse_as_dense=as_dense,
        )
        for words in ([rank, 2], [4 + rank, 2, 2]):
            with mx.autograd.record():
                loss = embedding(mx.nd.array(words)).sum()
            loss.backward()
            trainer.step(1)
        expected = np.zeros((10, 2))
        expected[[0, 1, 4, 5]] = -0.5
        expected[2] = -3
        np.testing.assert_array_equal(embedding.weight.data().asnumpy(), expected)


def branches(mx, count):
    nets = [mx.gluon.nn.Dense(1, in_units=1, use_bias=False) for _ in range(count)]
    for net in nets:
        net.initialize(mx.init.One())
    return nets


def parameters_of(nets):
    return [net.weight for net in nets]


@pytest.mark.ranks(2)
def test_what_some_ranks_use_is_updated_on_all(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    for halves in (False, True):
        nets = branches(mx, 4)  # used by both, by rank 0, by rank 1, by nobody
        trainer = hvd.DistributedTrainer(parameters_of(nets), "sgd", {"learning_rate": 1.0}, num_groups=2)
        with pytest.raises(UserWarning, match="has not been updated"):
            trainer.update(1)
        for step in range(2):
            with mx.autograd.record():
                loss = sum(nets[i](mx.nd.ones((1, 1)) * (i + 1 + step)) for i in (0, 1 + rank))
            loss.backward()
            if halves:
                trainer.allreduce_grads(ignore_stale_grad=True)
                trainer.update(1, ignore_stale_grad=True)
            else:
                trainer.step(1, ignore_stale_grad=True)
        expected = [1 - 1 - 2, 1 - (2 + 3) / 2, 1 - (3 + 4) / 2, 1]
        assert [net.weight.data().asscalar() for net in nets] == expected


@pytest.mark.ranks(2)
def test_what_one_pass_uses_is_not_added_twice(hvd, mx, np):
    hvd.init()
    nets = branches(mx, 2)
    trainer = hvd.DistributedTrainer(
        parameters_of(nets), "sgd", {"learning_rate": 1.0}, backward_passes_per_step=2
    )
    for step in range(2):
        for number in range(2):  # the second pass does not use the first net
            with mx.autograd.record():
                loss = sum(net(mx.nd.ones((1, 1)) * (hvd.rank() + 1)) for net in nets[number:])
            loss.backward()
            trainer.step(1)
        assert nets[0].weight.data().asscalar() == 1 - 1.5 * (step + 1)
        assert nets[1].weight.data().asscalar() == 1 - 3.0 * (step + 1)


@pytest.mark.ranks(2)
def test_gradients_that_stay_local(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    for options, factor in (
        ({}, 0.5),
        ({"scale_local_gradients": False}, 1.0),
        ({"op": hvd.Sum}, 1.0),
        ({"backward_passes_per_step": 1, "groups": 1}, 0.5),
    ):
        nets = branches(mx, 3)
        trainer = hvd.DistributedTrainer(parameters_of(nets), "sgd", {"learning_rate": 1.0}, **options)
        trainer.register_local_var(nets[1].weight)
        with mx.autograd.record():
            loss = sum(net(mx.nd.ones((1, 1)) * (i + rank + 1)) for i, net in enumerate(nets))
        loss.backward()
        trainer.step(1)
        average = 0.5 if options.get("op") != hvd.Sum else 1.0
        got = [net.weight.data().asscalar() for net in nets]
        assert got == [1 - 3 * average, 1 - factor * (2 + rank), 1 - 7 * average]
    with pytest.raises(hvd.InvalidArgumentError, match=r"register_local_var: .* is not in params"):
        trainer.register_local_var(mx.gluon.Parameter("other"))
    embedding = mx.gluon.nn.Embedding(6, 2, sparse_grad=True)
    embedding.initialize(mx.init.Zero())
    trainer = hvd.DistributedTrainer(embedding.collect_params(), "sgd", {"learning_rate": 1.0})
    trainer.register_local_var(embedding.weight)
    with mx.autograd.record():
        loss = embedding(mx.nd.array([rank, 3])).sum()
    loss.backward()
    trainer.step(1)
    expected = np.zeros((6, 2))
    expected[[rank, 3]] = -0.5
    np.testing.assert_array_equal(embedding.weight.data().asnumpy(), expected)


@pytest.mark.ranks(2)
def test_frozen_parameters_are_not_reduced(hvd, mx, np):
    hvd.init()
    net = convolutional(mx, np)
    parameters = list(net.collect_params().values())
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD, num_groups=2)
    parameters[0].grad_req = "null"  # after the groups were made
    before = weights(np, net)
    x, y = batch(mx, np, 0, [hvd.rank()])
    with mx.autograd.record():
        loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()(net(x), y)
    loss.backward()
    trainer.step(BATCH)
    after = weights(np, net)
    np.testing.assert_array_equal(after[0], before[0])
    assert all((a != b).any() for a, b in zip(after[1:], before[1:], strict=True))
    assert_same_bits_on_all_ranks(hvd, after)
