"""GluonState on ranks: commits that use the memory of earlier ones again."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import polyhvd.mxnet as hvd
import pytest
from mxnet import gluon

from polyhvd.elastic.checkpoint import pack, unpack
from polyhvd.training.passes import passes_held

pytestmark = pytest.mark.ranks(2, framework="mxnet")


def make(width: int = 3) -> Any:
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(width, in_units=2), gluon.nn.BatchNorm(in_channels=width))
    net.initialize(mx.init.Constant(hvd.rank() + 1.0))
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    return net, trainer, hvd.elastic.GluonState(net, trainer, step=0)


def values(net: Any) -> list[Any]:
    return [parameter.data().asnumpy().tolist() for parameter in net.collect_params().values()]


def put(net: Any, value: float) -> None:
    for parameter in net.collect_params().values():
        parameter.data()[:] = value


def test_restore_goes_back_to_the_last_of_several_commits() -> None:
    net, _, state = make()
    for number in (2.0, 3.0, 4.0, 5.0):
        put(net, number)
        state.commit()
        expected = values(net)
        for _ in range(2):
            put(net, -number)
            assert values(net) != expected
            state.restore()
            assert values(net) == expected
            put(net, -number)
        state.restore()


@pytest.mark.parametrize("kind", ["trainer", "optimizer"])
def test_pass_of_an_update_that_is_undone_is_not_counted(kind: str) -> None:
    net = gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.Constant(1.0))
    params, options = net.collect_params(), {"backward_passes_per_step": 2}
    if kind == "trainer":
        trainer = hvd.DistributedTrainer(params, "sgd", {"learning_rate": 1.0}, **options)
    else:
        optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0), **options)
        trainer = gluon.Trainer(params, optimizer, kvstore=None)
    state = hvd.elastic.GluonState(net, trainer)

    def make_pass(gradient: float) -> None:
        with mx.autograd.record():
            loss = net(mx.nd.array([[gradient]]))
        loss.backward()
        trainer.step(1)

    make_pass(100.0)
    assert passes_held() == 2
    state.restore()
    assert passes_held() == 0
    for number in (1.0, 2.0):
        make_pass(number * (hvd.rank() + 1))
    mean = (hvd.size() + 1) / 2
    assert values(net) == [[[1.0 - 3.0 * mean]]]


def test_what_a_sync_has_told_is_the_commit_on_every_rank() -> None:
    net, _, state = make()
    state.sync()
    synced = values(net)
    assert synced[0] == 3 * [[1.0, 1.0]]
    for _ in range(3):
        put(net, 7.0)
        state.restore()
        assert values(net) == synced
        state.commit()


@pytest.mark.ranks(3, framework="mxnet")
def test_network_and_trainer_are_sent_to_who_lacks_them_alone() -> None:
    net, trainer, state = make()
    state.sync()
    if hvd.rank() > 0:
        for _ in range(2):
            with mx.autograd.record():
                loss = net(mx.nd.ones((4, 2))).sum()
            loss.backward()
            trainer.step(4, ignore_stale_grad=True) if hvd.size() == 1 else trainer.update(4)
        put(net, 10.0 + hvd.rank())  # what differs between ranks tells that it was not sent
        state.step = 2
        state.commit()
        state.restore()
    state.sync()
    assert (state.step, trainer._updaters[0].optimizer.num_update) == (2, 2)
    assert values(net)[0] == 3 * [2 * [10.0 + max(1, hvd.rank())]]
    moments = [moment.asnumpy().tolist() for _, moment in sorted(trainer._updaters[0].states.items())]
    assert len(moments) >= 2
    assert hvd.allgather_object(moments) == 3 * [moments]


def test_scheduler_stays_the_object_that_the_program_knows() -> None:
    net = gluon.nn.Dense(2, in_units=2)
    net.initialize()
    scheduler = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.8)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"lr_scheduler": scheduler})
    state = hvd.elastic.GluonState(net, trainer)
    state.sync()
    scheduler.base_lr = 0.4 if hvd.rank() == 0 else 0.3
    state.commit()
    tree, arrays = pack(state.exported())
    kept = unpack(tree, arrays.__getitem__)
    state.sync()
    assert trainer.learning_rate == 0.4, "rank 0's, which was sent to the others"
    scheduler.base_lr = 0.1
    assert trainer.learning_rate == 0.1
    state.restore()
    assert trainer.learning_rate == 0.4
    scheduler.base_lr = 0.1
    assert trainer.learning_rate == 0.1
    state.imported(kept)
    assert trainer.learning_rate == (0.4 if hvd.rank() == 0 else 0.3)
    assert trainer._optimizer.lr_scheduler is scheduler
    other = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    with pytest.raises(ValueError, match="it has the lr_scheduler FactorScheduler, expected None"):
        hvd.elastic.GluonState(net, other).imported(kept)
