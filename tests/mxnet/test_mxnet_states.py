"""Optimizer states: from the root to all ranks, and through files."""

from __future__ import annotations

import pytest
from mxnet_models import (
    BATCH,
    assert_equal_to_joined_batch,
    assert_same_bits_on_all_ranks,
    batch,
    convolutional,
    elementwise,
    train,
    weights,
)

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}


def states_of(np, trainer):
    """The arrays of the optimizer's states, in the order of the model."""

    def arrays(state):
        if state is None:
            return []
        if isinstance(state, (list, tuple)):
            return [array for part in state for array in arrays(part)]
        return [state.asnumpy()]

    numbers = [trainer._param2idx[p.name] for p in trainer._in_order]
    return [array for number in numbers for array in arrays(trainer._updaters[0].states.get(number))]


@pytest.mark.ranks(2)
def test_a_job_goes_on_from_what_the_root_has_loaded(hvd, mx, np, tmp_path):
    hvd.init()
    rank = hvd.rank()
    with mx.name.NameManager():  # as in two programs, whose layers have the numbers from 0
        net = convolutional(mx, np)
    first = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD)
    train(mx, np, net, first, [rank], 10)
    if rank == 0:
        net.save_parameters(str(tmp_path / "net"))
        first.save_states(str(tmp_path / "trainer"))
    hvd.barrier()
    with mx.name.NameManager():
        for _ in range(rank * 9):
            mx.gluon.nn.Dense(1)  # Gluon sorts the layers of this rank otherwise
        net = convolutional(mx, np, seed=5 + rank)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD)
    optimizer = trainer.optimizer
    if rank == 0:
        net.load_parameters(str(tmp_path / "net"))
        trainer.load_states(str(tmp_path / "trainer"))
    elif rank == 1:  # whose own states are of no use
        train_alone = mx.gluon.Trainer(net.collect_params(), "sgd", SGD, kvstore=None)
        train(mx, np, net, train_alone, [0], 1)
    hvd.broadcast_parameters(net.collect_params())
    hvd.broadcast_optimizer_state(trainer)
    assert rank == 0 or trainer.optimizer is optimizer
    assert trainer.optimizer.num_update == 10
    assert_same_bits_on_all_ranks(hvd, states_of(np, trainer))
    assert len(states_of(np, trainer)) == 8
    loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(10, 20):
        x, y = batch(mx, np, step, [rank])
        with mx.autograd.record():
            loss = loss_function(net(x), y)
        loss.backward()
        trainer.step(BATCH)
    assert_equal_to_joined_batch(hvd, mx, np, net, "sgd", SGD)


OPTIMIZERS = {
    "sgd": {"momentum": 0.9, "multi_precision": True},
    "nag": {"momentum": 0.9},
    "adam": {},
    "lamb": {},
    "adagrad": {},
    "rmsprop": {"centered": True},
    "ftrl": {},
    "adamax": {},
    "nadam": {},
    "signum": {},
    "adadelta": {},
}


@pytest.mark.ranks(2)
def test_states_of_every_optimizer(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    for name, options in OPTIMIZERS.items():
        for dtype in ("float32", "float16") if name == "sgd" else ("float32",):
            net = elementwise(mx, dtype)
            scheduler = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
            trainer = hvd.DistributedTrainer(
                net.collect_params(), name, {**options, "lr_scheduler": scheduler}
            )

            def step(number, trainer=trainer, net=net, dtype=dtype):
                x = mx.nd.array(np.random.RandomState(10 * number + rank).randn(4, 3), dtype=dtype)
                with mx.autograd.record():
                    loss = (net(x) ** 2).sum()
                loss.backward()
                trainer.step(4)

            if rank == 1:  # the root has taken steps that the other has not; a plain optimizer, alone
                for number in range(3):
                    with mx.autograd.record():
                        loss = (net(mx.nd.ones((4, 3), dtype=dtype) * (number + 1)) ** 2).sum()
                    loss.backward()
                    trainer._update()
            hvd.broadcast_parameters(net.collect_params(), root_rank=1)
            hvd.broadcast_optimizer_state(trainer, root_rank=1)
            assert trainer.optimizer.num_update == 3, name
            assert_same_bits_on_all_ranks(hvd, states_of(np, trainer))
            for number in range(3):
                step(number)
            assert_same_bits_on_all_ranks(hvd, [*states_of(np, trainer), *weights(np, net)])
            assert len(set(hvd.allgather_object(trainer.learning_rate))) == 1


@pytest.mark.ranks(2)
def test_states_of_updaters_and_what_is_refused(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    net = mx.gluon.nn.Dense(4, in_units=3)
    net.initialize()
    trainer = hvd.DistributedTrainer(net.collect_params(), ("sgd", "adam")[rank])
    with pytest.raises(hvd.InvalidArgumentError, match="root rank 7 is not one of the ranks that take part"):
        hvd.broadcast_optimizer_state(trainer, root_rank=7)
    with pytest.raises(hvd.RankMismatchError, match=r"ranks \[1\] have another optimizer .* has SGD of 2"):
        hvd.broadcast_optimizer_state(trainer)
    with pytest.raises(TypeError, match="expected a Gluon trainer or an updater, found dict"):
        hvd.broadcast_optimizer_state({})
    # An updater, as a module has it.
    updater = mx.optimizer.get_updater(hvd.DistributedOptimizer(mx.optimizer.Adam()))
    weight, gradient = mx.nd.ones(3), mx.nd.ones(3)
    for _ in range(2):
        updater(0, gradient * (rank + 1), weight)
    plain = mx.optimizer.get_updater(mx.optimizer.Adam())
    if rank == 1:
        plain(0, gradient, weight)
    hvd.broadcast_optimizer_state(plain, root_rank=1)
    assert plain.optimizer.num_update == 1
    assert plain.states[0][0].asnumpy() == pytest.approx(np.full(3, 0.1))
    hvd.broadcast_optimizer_state(updater)
    assert updater.optimizer.num_update == 2
