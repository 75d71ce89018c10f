"""Weights that differ between ranks, trainers that are not distributed, and ``kvstore="horovod"``."""

from __future__ import annotations

import pytest
from drift_reports import drift_reports

WARN = {"POLYHVD_CHECK_DRIFT": "warn"}
pytestmark = pytest.mark.ranks(2, framework="mxnet", timeout_s=180, env=WARN)


def make_net(hvd, mx, seed=None):
    net = mx.gluon.nn.Dense(2, in_units=3)
    mx.random.seed(hvd.rank() if seed is None else seed)
    net.initialize(mx.init.Normal(0.3))
    return net


def train(hvd, mx, np, net, trainer, batch_size=4, ranks=None, steps=3):
    for step in range(steps):
        given = [np.random.RandomState(10 * step + rank).rand(4, 3) for rank in ranks or [hvd.rank()]]
        x = mx.nd.array(np.concatenate(given))
        with mx.autograd.record():
            loss = (net(x) ** 2).sum()
        loss.backward()
        trainer.step(batch_size)


def everyones(hvd, reports):
    return [report for some in hvd.allgather_object(reports) for report in some]


def plain(mx, net, **arguments):
    return mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, **arguments)


@pytest.mark.parametrize("kind", ["trainer", "optimizer"])
def test_one_report_names_the_first_weight_and_the_ranks(hvd, mx, np, kind):
    net = make_net(hvd, mx)
    if kind == "trainer":
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd")
    else:
        trainer = mx.gluon.Trainer(net.collect_params(), hvd.DistributedOptimizer(mx.optimizer.SGD()))
    with drift_reports() as reports:
        train(hvd, mx, np, net, trainer)
    (report,) = everyones(hvd, reports)
    assert f"Distributed{kind.capitalize()}: 1 of 2 weights differ between ranks" in report
    assert (
        f"the first is '{net.weight.name}': rank 1 has other values than rank 0; call hvd.broadcast" in report
    )


@pytest.mark.parametrize("kind", ["trainer", "optimizer"])
def test_learning_rates_that_differ_are_reported_with_their_values(hvd, mx, np, kind):
    net = make_net(hvd, mx, seed=1)
    options = {"learning_rate": 0.125 * (1 + hvd.rank()), "momentum": 0.9}
    if kind == "trainer":
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", options)
    else:
        optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(**options))
        trainer = mx.gluon.Trainer(net.collect_params(), optimizer)
    with drift_reports() as reports:
        train(hvd, mx, np, net, trainer)
    (report,) = everyones(hvd, reports)
    assert f"Distributed{kind.capitalize()}: the learning rate of '{net.prefix}" in report
    assert "' differs between ranks: " in report
    assert "0.125 on rank 0, 0.25 on rank 1; set the same value on every rank" in report


@pytest.mark.parametrize("case", ["on one rank", "equal", "broadcast"])
def test_a_state_of_the_optimizer_that_only_one_rank_has_loaded_is_reported(hvd, mx, np, tmp_path, case):
    net = make_net(hvd, mx, seed=1)
    saved = plain(mx, net)
    train(hvd, mx, np, net, saved, ranks=[0], steps=1)
    saved.save_states(str(tmp_path / "states"))
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
    if hvd.rank() == 1 or case == "equal":
        trainer.load_states(str(tmp_path / "states"))
    if case == "broadcast":
        hvd.broadcast_optimizer_state(trainer, root_rank=1)
    with drift_reports() as reports:
        train(hvd, mx, np, net, trainer)
    found = everyones(hvd, reports)
    if case != "on one rank":
        assert found == []
        return
    (report,) = found
    assert "DistributedTrainer: the optimizer's states of 2 weights differ between ranks" in report
    assert (
        f"the first is that of '{net.weight.name}': rank 1 has one, rank 0 has none; load the state" in report
    )


def test_schedules_and_rates_of_local_parameters_are_not_reported(hvd, mx, np):
    net = make_net(hvd, mx, seed=1)
    schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=0.1)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"lr_scheduler": schedule})
    local = hvd.DistributedTrainer(
        net.collect_params(), "sgd", {"learning_rate": 0.1 + hvd.rank()}, prefix="local"
    )
    for parameter in net.collect_params().values():
        local.register_local_var(parameter)
    with drift_reports() as reports:
        train(hvd, mx, np, net, trainer)
        train(hvd, mx, np, net, local)
    assert everyones(hvd, reports) == []


@pytest.mark.parametrize("deferred", [True, False])
def test_weights_that_were_broadcast_are_not_reported(hvd, mx, np, deferred):
    net = mx.gluon.nn.Dense(2) if deferred else make_net(hvd, mx)
    net.initialize(mx.init.Normal(0.3))
    hvd.broadcast_parameters(net.collect_params())
    with drift_reports() as reports:
        train(hvd, mx, np, net, hvd.DistributedTrainer(net.collect_params(), "sgd"))
    assert everyones(hvd, reports) == []


def test_a_parameter_that_ranks_keep_for_themselves_is_not_reported(hvd, mx, np):
    net = make_net(hvd, mx)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd")
    trainer.register_local_var(net.weight)
    with drift_reports() as reports:
        train(hvd, mx, np, net, trainer)
    assert everyones(hvd, reports) == []


def test_ranks_may_step_their_trainers_in_any_order(hvd, mx, np):
    nets = [make_net(hvd, mx) for _ in range(2)]
    trainers = [
        hvd.DistributedTrainer(net.collect_params(), "sgd", prefix=f"net{number}")
        for number, net in enumerate(nets)
    ]
    pairs = list(zip(nets, trainers, strict=True))
    with drift_reports() as reports:
        for net, trainer in pairs if hvd.rank() == 0 else reversed(pairs):
            train(hvd, mx, np, net, trainer, steps=1)
        mx.nd.waitall()
    assert len(everyones(hvd, reports)) == 2


def fit(hvd, mx, np, net, trainer):
    from mxnet.gluon.contrib.estimator import Estimator

    metrics = [mx.metric.MSE()]
    loss = mx.gluon.loss.L2Loss()
    estimator = Estimator(net, loss, train_metrics=metrics, trainer=trainer, context=mx.cpu())
    points = np.random.RandomState(hvd.rank()).rand(8, 3).astype("float32")
    data = mx.gluon.data.DataLoader(mx.gluon.data.ArrayDataset(points, points[:, :2]), 4)
    handlers = [hvd.estimator.BroadcastHandler(), hvd.estimator.MetricAverageHandler()]
    with drift_reports() as reports:
        estimator.fit(data, epochs=3, event_handlers=handlers)
    return everyones(hvd, reports)


def test_an_estimator_with_a_plain_trainer_is_reported(hvd, mx, np):
    net = make_net(hvd, mx)
    begin, end = fit(hvd, mx, np, net, plain(mx, net))
    assert "BroadcastHandler: the trainer is not distributed" in begin
    assert "MetricAverageHandler: at the end of an epoch 2 of 2 weights differ between ranks" in end
    assert "hvd.DistributedTrainer" in end


@pytest.mark.parametrize("kvstore", ["horovod", None])
def test_an_estimator_that_trains_one_model_is_not_reported(hvd, mx, np, kvstore):
    net = make_net(hvd, mx)
    distributed = hvd.DistributedTrainer(net.collect_params(), "sgd")
    assert fit(hvd, mx, np, net, plain(mx, net, kvstore=kvstore) if kvstore else distributed) == []


@pytest.mark.parametrize("by_name", [True, False], ids=["name", "store"])
def test_the_store_of_a_plain_trainer_trains_as_one_process_does(hvd, mx, np, by_name):
    net, oracle = make_net(hvd, mx, seed=0), make_net(hvd, mx, seed=0)
    store = "horovod" if by_name else mx.kv.create("horovod")
    size = hvd.size()
    train(hvd, mx, np, net, plain(mx, net, kvstore=store), batch_size=4 * size)
    train(hvd, mx, np, oracle, plain(mx, oracle, kvstore=None), batch_size=4 * size, ranks=range(size))
    for ours, theirs in zip(net.collect_params().values(), oracle.collect_params().values(), strict=True):
        np.testing.assert_allclose(ours.data().asnumpy(), theirs.data().asnumpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["store", "optimizer"])
def test_layers_whose_numbers_have_more_digits_on_a_rank_are_paired(hvd, mx, np, kind):
    """Gluon sorts the parameters by name, and "dense10" comes before "dense9"."""
    numbers = ((0, 1), (9, 10))[hvd.rank()]
    layers = [
        mx.gluon.nn.Dense(1, in_units=1, use_bias=False, prefix=f"dense{number}_") for number in numbers
    ]
    parameters = mx.gluon.ParameterDict()
    for layer in layers:
        layer.initialize(mx.init.One())
        parameters.update(layer.collect_params())
    if kind == "store":
        trainer = mx.gluon.Trainer(parameters, "sgd", {"learning_rate": 1.0}, kvstore="horovod")
    else:
        optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0), op=hvd.Sum)
        trainer = mx.gluon.Trainer(parameters, optimizer, kvstore=None)
    x = mx.nd.ones((1, 1)) * (1 + hvd.rank())
    with mx.autograd.record():
        loss = layers[0](x) + layers[1](10 * x)
    loss.backward()
    trainer.step(1)
    assert [layer.weight.data().asscalar() for layer in layers] == [1 - 3, 1 - 30]


def test_the_store_adds_up_arrays_of_a_rank_and_of_all_ranks(hvd, mx, np):
    store = mx.kv.create("horovod")
    assert (store.type, store.rank, store.num_workers) == ("horovod", hvd.rank(), hvd.size())
    arrays, out = [mx.nd.ones(3) * (hvd.rank() + 1) for _ in range(2)], mx.nd.zeros(3)
    store.pushpull("sum", arrays, out=out)
    assert out.asnumpy().tolist() == 3 * [2.0 * 3]
    store.pushpull(0, arrays)
    assert [array.asnumpy().tolist() for array in arrays] == 2 * [3 * [6.0]]
    store.broadcast("root", mx.nd.ones(3) * hvd.rank(), [arrays[0], out])
    assert (arrays[0] + out).asnumpy().tolist() == [0, 0, 0]


def test_modules_and_sparse_gradients_refuse_the_store(hvd, mx, np):
    data = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=1)
    module = mx.mod.Module(data, label_names=None)
    module.bind([("data", (4, 3))], None, for_training=True)
    module.init_params()
    with pytest.raises(NotImplementedError, match="DistributedOptimizer"):
        module.init_optimizer(kvstore="horovod")
    net = mx.gluon.nn.Embedding(4, 2, sparse_grad=True)
    net.initialize()
    with mx.autograd.record():
        loss = net(mx.nd.array([1])).sum()
    loss.backward()
    with pytest.raises(ValueError, match="Cannot use"):
        plain(mx, net, kvstore="horovod").step(1)


@pytest.mark.ranks(2, framework="mxnet", timeout_s=180, env={"POLYHVD_CHECK_DRIFT": "error"})
def test_an_error_is_raised_on_every_rank_before_the_step(hvd, mx, np):
    net = make_net(hvd, mx)
    before = net.weight.data().asnumpy()
    with pytest.raises(mx.base.MXNetError, match="rank 1 has other values"):
        train(hvd, mx, np, net, hvd.DistributedTrainer(net.collect_params(), "sgd"))
    assert (net.weight.data().asnumpy() == before).all()


@pytest.mark.parametrize("left_out", [False, True], ids=["frozen", "left out"])
def test_a_layer_that_one_rank_freezes_is_an_error_on_every_rank(hvd, mx, np, left_out):
    net = make_net(hvd, mx, seed=1)
    if hvd.rank() == 1:
        net.bias.grad_req = "null"
    trained = {name: each for name, each in net.collect_params().items() if each.grad_req != "null"}
    trainer = hvd.DistributedTrainer(trained if left_out else net.collect_params(), "sgd")
    with pytest.raises(hvd.RankMismatchError) as caught:
        train(hvd, mx, np, net, trainer)
    text = f"the ranks train different weights: '{net.bias.name}' is trained on rank 0 and not on rank 1"
    assert f"DistributedTrainer: {text}; freeze the same weights" in str(caught.value)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("kind", ["trainer", "updater", "other layers"])
def test_a_layer_that_one_rank_freezes_is_an_error_of_its_optimizer(hvd, mx, np, kind):
    net = make_net(hvd, mx, seed=1)
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD())
    if hvd.rank() == 1:
        net.bias.grad_req = "null"

    def run_updater():
        optimizer.idx2name = {0: "weight", 1: "bias", 2: "scale"}
        updater = mx.optimizer.get_updater(optimizer)
        if kind == "other layers":  # of the same shapes
            updates = [0, 2, 0] if hvd.rank() == 1 else [1, 2, 1]
        else:
            updates = [0, 0] if hvd.rank() == 1 else [0, 1, 0]
        for index in updates:
            updater(index, mx.nd.ones(3), mx.nd.ones(3))

    def run_trainer():
        train(hvd, mx, np, net, mx.gluon.Trainer(net.collect_params(), optimizer))

    with pytest.raises(hvd.RankMismatchError) as caught:
        run_trainer() if kind == "trainer" else run_updater()
    name = net.bias.name if kind == "trainer" else "bias"
    text = f"the ranks train different weights: '{name}' is trained on ranks 0, 2 and not on rank 1"
    if kind == "other layers":
        text += "; 'weight' is trained on rank 1 and not on ranks 0, 2"
    assert f"DistributedOptimizer: {text}; freeze the same weights" in str(caught.value)
