"""Training on n ranks is training of one process on the joined batch."""

from __future__ import annotations

import pickle
import warnings

import pytest
from mxnet_models import (
    BATCH,
    assert_equal_to_joined_batch,
    assert_same_bits_on_all_ranks,
    batch,
    convolutional,
    train,
    weights,
)

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}


@pytest.mark.ranks(2)
def test_trainer_equals_one_process_with_the_joined_batch(hvd, mx, np):
    hvd.init()
    for hybrid in (None, {}, {"static_alloc": True}, {"static_alloc": True, "static_shape": True}):
        net = convolutional(mx, np)
        if hybrid is not None:
            net.hybridize(**hybrid)
        before = weights(np, net)
        train(mx, np, net, hvd.DistributedTrainer(net.collect_params(), "sgd", SGD), [hvd.rank()])
        assert np.abs(weights(np, net)[0] - before[0]).max() > 1e-3
        assert_equal_to_joined_batch(hvd, mx, np, net, "sgd", SGD)


@pytest.mark.ranks(3)
def test_trainer_on_three_ranks_with_adam(hvd, mx, np):
    hvd.init()
    net = convolutional(mx, np)
    train(mx, np, net, hvd.DistributedTrainer(net.collect_params(), "adam"), [hvd.rank()], 5)
    alone = convolutional(mx, np)
    train(mx, np, alone, mx.gluon.Trainer(alone.collect_params(), "adam", kvstore=None), range(3), 5)
    for got, expected in zip(weights(np, net), weights(np, alone), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4)  # Adam divides by small numbers
    assert_same_bits_on_all_ranks(hvd, weights(np, net))


@pytest.mark.ranks(2)
def test_compression_and_predivision_keep_the_average(hvd, mx, np):
    hvd.init()
    for options, tolerance in (
        ({"gradient_predivide_factor": 2.0}, 1e-5),
        ({"prefix": "generator"}, 1e-5),
        ({"compression": hvd.Compression.fp16}, 1e-2),
        ({"compression": hvd.Compression.bf16}, 5e-2),
    ):
        net = convolutional(mx, np)
        train(
            mx, np, net, hvd.DistributedTrainer(net.collect_params(), "sgd", SGD, **options), [hvd.rank()], 5
        )
        alone = convolutional(mx, np)
        train(mx, np, alone, mx.gluon.Trainer(alone.collect_params(), "sgd", SGD, kvstore=None), range(2), 5)
        for got, expected in zip(weights(np, net), weights(np, alone), strict=True):
            np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)
        assert_same_bits_on_all_ranks(hvd, weights(np, net))


@pytest.mark.ranks(2, 3)
def test_trainers_that_ranks_step_in_different_order_keep_their_gradients_apart(hvd, mx, np):
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for process_set in (hvd.global_process_set, *([hvd.add_process_set([0, 1])] if size == 3 else [])):
        members = range(size) if process_set is hvd.global_process_set else range(2)
        nets = [mx.gluon.nn.Dense(2, in_units=3, use_bias=False) for _ in range(3)]
        trainers = []
        for net in nets:
            net.initialize(mx.init.Zero())
            options = {"process_set": process_set}
            trainers.append(
                hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 1}, **options)
            )
        for _ in range(2):
            for number in range(3) if rank == 0 else (1, 2, 0):
                with mx.autograd.record():
                    loss = (nets[number](mx.nd.ones((1, 3))) * 10**number * (rank + 1)).sum()
                loss.backward()
                trainers[number].step(1)
        mean = np.mean([r + 1 for r in members]) if rank in members else rank + 1
        for number, net in enumerate(nets):
            np.testing.assert_allclose(net.weight.data().asnumpy(), -2 * mean * 10**number, rtol=1e-6)


@pytest.mark.ranks(2)
def test_parameters_meet_by_position_not_by_gluons_names(hvd, mx, np):
    hvd.init()
    for _ in range(hvd.rank() * 9):
        mx.gluon.nn.Dense(1)  # now Gluon names the layers of this rank otherwise, and sorts them otherwise
    net = mx.gluon.nn.Sequential()
    for units in (3, 4, 5, 6):
        net.add(mx.gluon.nn.Dense(units))
    net.initialize(mx.init.Normal(1.0 + hvd.rank()))
    hvd.broadcast_parameters(net.collect_params())
    net(mx.nd.ones((1, 3)))
    distributed = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD)
    names = hvd.allgather_object([p.name for p in distributed._params])
    assert [n.split("_")[0] for n in names[0]] != [n.split("_")[0] for n in names[1]]
    for _ in range(3):
        with mx.autograd.record():
            loss = net(mx.nd.ones((2, 3)) * (hvd.rank() + 1)).sum()
        loss.backward()
        distributed.step(2)
    assert_same_bits_on_all_ranks(hvd, weights(np, net))


@pytest.mark.ranks(2)
def test_deferred_parameters_are_broadcast_after_their_initialisation(hvd, mx, np):
    hvd.init()
    for hybrid in (False, True):
        for broadcast_first in (False, True):
            mx.random.seed(hvd.rank() + 1)
            net = mx.gluon.nn.HybridSequential()
            net.add(
                mx.gluon.nn.Conv2D(4, 3), mx.gluon.nn.BatchNorm(), mx.gluon.nn.Dense(7), mx.gluon.nn.Dense(2)
            )
            if hybrid:
                net.hybridize(static_alloc=True)
            if broadcast_first:
                hvd.broadcast_parameters(net.collect_params(), root_rank=1)
            net.initialize(mx.init.Normal(1.0))
            if not broadcast_first:
                hvd.broadcast_parameters(net.collect_params(), root_rank=1)
            outputs = net(mx.nd.ones((1, 3, 6, 6)))
            assert_same_bits_on_all_ranks(hvd, [*weights(np, net), outputs.asnumpy()])
            # Once only: what a rank initialises later is its own affair.
            if hvd.rank() == 0:
                net.initialize(mx.init.Normal(5.0), force_reinit=True)
                net(mx.nd.ones((1, 3, 6, 6))).wait_to_read()
            first = hvd.allgather_object(weights(np, net)[0].tobytes())
            assert first[0] != first[1]


@pytest.mark.ranks(2)
def test_broadcast_parameters(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    net = convolutional(mx, np, seed=rank)
    hvd.broadcast_parameters(net.collect_params(), root_rank=1)
    expected = weights(np, convolutional(mx, np, seed=1))
    for got, want in zip(weights(np, net), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    arrays = {"b": mx.nd.ones(3) * rank, "a": mx.nd.zeros((2, 2)) + rank}
    hvd.broadcast_parameters(dict(sorted(arrays.items())) if rank else arrays, prefix="module")
    assert arrays["a"].asnumpy().tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert arrays["b"].asnumpy().tolist() == [0.0] * 3
    with pytest.raises(ValueError, match="expected a dict of arrays"):
        hvd.broadcast_parameters([mx.nd.ones(1)])
    with pytest.raises(hvd.RankMismatchError, match="Mismatched"):
        hvd.broadcast_parameters({"a": mx.nd.ones(2 + rank)})


@pytest.mark.ranks(2)
def test_one_ranks_overflow_is_every_ranks(hvd, mx, np):
    from mxnet.contrib.amp.loss_scaler import LossScaler

    hvd.init()
    net = convolutional(mx, np)
    distributed = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD)
    distributed._amp_loss_scaler = scaler = LossScaler()
    distributed._amp_original_scale = distributed._scale
    before = weights(np, net)
    for step, rank_with_inf in enumerate((1, 0, None)):
        x, _ = batch(mx, np, step, [hvd.rank()])
        factor = float("inf") if hvd.rank() == rank_with_inf else 1.0
        with mx.autograd.record():
            loss = (net(x) * factor).sum()
        loss.backward()
        distributed.step(BATCH)
        changed = any((a != b).any() for a, b in zip(weights(np, net), before, strict=True))
        assert changed == (rank_with_inf is None)
        assert_same_bits_on_all_ranks(hvd, weights(np, net))
    assert scaler.loss_scale == 2.0**14


@pytest.mark.ranks(2)
def test_saved_states_and_the_two_halves_of_a_step(hvd, mx, np, tmp_path):
    hvd.init()
    path = str(tmp_path / f"states{hvd.rank()}")
    net = convolutional(mx, np)
    first = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD)
    train(mx, np, net, first, [hvd.rank()], 10)
    first.save_states(path)
    second = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD)
    second.load_states(path)
    loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(10, 20):
        x, y = batch(mx, np, step, [hvd.rank()])
        with mx.autograd.record():
            loss = loss_function(net(x), y)
        loss.backward()
        second.allreduce_grads()
        second.update(BATCH)
    assert_equal_to_joined_batch(hvd, mx, np, net, "sgd", SGD)


@pytest.mark.ranks(1)
def test_what_the_trainer_refuses(hvd, mx, np):
    hvd.init()
    net = convolutional(mx, np)
    parameters = list(net.collect_params().values())
    twice, other = [parameters[:2], parameters[1:3]], [[mx.gluon.Parameter("other")]]
    for options, match in (
        ({"num_groups": -1}, "num_groups=-1"),
        ({"num_groups": 2, "groups": [parameters]}, "exclude each other"),
        ({"groups": twice}, r"groups\[1\]\[0\] is in groups\[0\] already"),
        ({"groups": other}, r"groups\[0\]\[0\] .* is not a parameter of this optimizer"),
        ({"op": hvd.Max}, "op=.*Average, Sum or Adasum"),
        ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "needs op=Average"),
    ):
        with pytest.raises(hvd.InvalidArgumentError, match=match):
            hvd.DistributedTrainer(net.collect_params(), "sgd", **options)
    with pytest.raises(hvd.InvalidArgumentError, match=r"groups\[1\]\[0\] is in groups\[0\] already"):
        hvd.DistributedOptimizer(mx.optimizer.SGD(), groups=[[1, 3], [3]])
    sparse = mx.gluon.Parameter("sparse", shape=(4, 3), stype="row_sparse", grad_stype="row_sparse")
    sparse.initialize()
    with pytest.raises(hvd.InvalidArgumentError, match="row_sparse parameters"):
        hvd.DistributedTrainer([sparse], "sgd")
    twice = convolutional(mx, np)
    twice.collect_params().reset_ctx([mx.cpu(0), mx.cpu(1)])
    with pytest.raises(hvd.InvalidArgumentError, match="one device"):
        hvd.DistributedTrainer(twice.collect_params(), "sgd")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        unwrapped = hvd.DistributedTrainer(net.collect_params(), hvd.DistributedOptimizer(mx.optimizer.SGD()))
    assert type(unwrapped.optimizer) is mx.optimizer.SGD
    assert any("unwrapped" in str(w.message) for w in caught)


@pytest.mark.ranks(1)
def test_what_is_no_optimizer_is_refused_with_the_order_of_the_arguments(hvd, mx, np):
    hvd.init()
    parameters = convolutional(mx, np).collect_params()
    trainer = mx.gluon.Trainer(parameters, "sgd", kvstore=None)
    with pytest.raises(hvd.InvalidArgumentError, match="found a Trainer; give the name or the optimizer"):
        hvd.DistributedTrainer(parameters, trainer)
    with pytest.raises(hvd.InvalidArgumentError, match=r"DistributedTrainer\(params, optimizer"):
        hvd.DistributedTrainer("sgd", parameters)


def requests_of(hvd, call):
    """Requests that a call makes."""
    before = hvd.counters()["operations"]
    call()
    return hvd.counters()["operations"] - before


@pytest.mark.ranks(2)
def test_each_group_of_gradients_is_one_request(hvd, mx, np):
    hvd.init()
    for make, requests in (
        (lambda parameters: {}, 8),
        (lambda parameters: {"num_groups": 3}, 3),
        (lambda parameters: {"num_groups": 99}, 8),
        (lambda parameters: {"groups": [parameters[:3], parameters[5:7]]}, 5),
        (lambda parameters: {"groups": [parameters[::-1]], "compression": hvd.Compression.none}, 1),
    ):
        net = convolutional(mx, np)
        options = make(list(net.collect_params().values()))
        distributed = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD, **options)
        train(mx, np, net, distributed, [hvd.rank()])
        assert_equal_to_joined_batch(hvd, mx, np, net, "sgd", SGD)

        def reduce(distributed=distributed):
            distributed.allreduce_grads()
            mx.nd.waitall()

        assert requests_of(hvd, reduce) == requests


@pytest.mark.ranks(2)
def test_a_group_may_hold_several_dtypes(hvd, mx, np):
    hvd.init()
    net = mx.gluon.nn.Sequential()
    net.add(mx.gluon.nn.Dense(3, in_units=2, dtype="float16"), mx.gluon.nn.Dense(2, in_units=2))
    net.initialize()
    parameters = list(net.collect_params().values())
    for options in (
        {"groups": [parameters]},
        {"num_groups": 1, "compression": hvd.Compression.fp16},
        {"num_groups": 1, "op": hvd.Sum},
    ):
        distributed = hvd.DistributedTrainer(net.collect_params(), "sgd", **options)
        for i, parameter in enumerate(parameters):
            parameter.grad()[:] = (i + 1) * (hvd.rank() + 1)
        distributed.allreduce_grads()
        factor = 3 if "op" in options else 1.5
        for i, parameter in enumerate(parameters):
            np.testing.assert_array_equal(
                parameter.grad().asnumpy(), np.full(parameter.shape, factor * (i + 1))
            )


@pytest.mark.ranks(2)
def test_adasum_combines_gradients(hvd, mx, np):
    hvd.init()
    weight = mx.gluon.Parameter("weight", shape=(2,))
    weight.initialize()
    distributed = hvd.DistributedTrainer([weight], "sgd", op=hvd.Adasum)
    for gradients, expected in (
        (([1.0, 0.0], [0.0, 2.0]), [1.0, 2.0]),  # orthogonal ones add up
        (([1.0, 2.0], [1.0, 2.0]), [1.0, 2.0]),  # of equal ones one remains
    ):
        weight.grad()[:] = mx.nd.array(gradients[hvd.rank()])
        distributed.allreduce_grads()
        np.testing.assert_allclose(weight.grad().asnumpy(), expected, rtol=1e-6)


@pytest.mark.ranks(2)
def test_models_that_differ_show_at_the_next_read_at_the_latest(hvd, mx, np):
    hvd.init()
    net = mx.gluon.nn.Dense(3 + hvd.rank(), in_units=2)
    net.initialize()
    distributed = hvd.DistributedTrainer(net.collect_params(), "sgd")
    with mx.autograd.record():
        loss = net(mx.nd.ones((1, 2))).sum()
    loss.backward()

    def step_and_read():
        distributed.step(1)  # which tells what it knows by then
        net.weight.data().asnumpy()

    # Both are updated by one operation of MXNet's, which tells of one of them.
    errors = (mx.base.MXNetError, hvd.RankMismatchError)
    with pytest.raises(errors, match=r"Mismatched .*'DistributedTrainer.*\.gradient.[01]'"):
        step_and_read()


@pytest.mark.ranks(2)
def test_optimizer_averages_before_its_update(hvd, mx, np):
    hvd.init()
    for multi_precision, dtype, tolerance in ((False, "float32", 1e-5), (True, "float16", 2e-3)):
        options = {"learning_rate": 0.1, "momentum": 0.9, "multi_precision": multi_precision}
        wrapper = hvd.DistributedOptimizer(mx.optimizer.SGD(**options, rescale_grad=1 / BATCH))
        assert isinstance(wrapper, mx.optimizer.Optimizer)
        wrapper.set_learning_rate(0.2)
        assert wrapper.learning_rate == wrapper.wrapped.learning_rate == wrapper.lr == 0.2
        wrapper.rescale_grad = 1 / (2 * BATCH)
        assert wrapper.wrapped.rescale_grad == 1 / (2 * BATCH)
        copy = pickle.loads(pickle.dumps(wrapper))
        assert copy.momentum == 0.9
        plain = mx.optimizer.SGD(**{**options, "learning_rate": 0.2}, rescale_grad=1 / (2 * BATCH))
        update, expected_update = mx.optimizer.get_updater(copy), mx.optimizer.get_updater(plain)
        shapes = [(3, 2), (4,), (2, 2), (5,), (1,), (6,)]
        mine = [mx.nd.ones(s, dtype=dtype) for s in shapes]
        expected = [mx.nd.ones(s, dtype=dtype) for s in shapes]
        for step in range(5):
            every = [
                [np.random.RandomState(100 * step + 10 * i + r).randn(*s) for r in range(2)]
                for i, s in enumerate(shapes)
            ]
            gradients = [mx.nd.array(g[hvd.rank()], dtype=dtype) for g in every]
            means = [mx.nd.array(sum(g) / 2, dtype=dtype) for g in every]
            keys = list(range(len(shapes)))
            update(keys, gradients, mine)
            expected_update(keys, means, expected)
        for got, want in zip(mine, expected, strict=True):
            np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), rtol=tolerance, atol=tolerance)
        assert_same_bits_on_all_ranks(hvd, [a.asnumpy() for a in mine])


@pytest.mark.ranks(2)
def test_groups_of_the_optimizer_span_what_mxnet_updates_at_once(hvd, mx, np):
    hvd.init()
    shapes = [(3, 2), (4,), (2, 2), (5,), (1,), (6,), (2,)]
    keys = list(range(len(shapes)))
    options = {"learning_rate": 0.1, "momentum": 0.9}

    def gradients(step):
        return [mx.nd.ones(shape) * (key + step) for key, shape in enumerate(shapes)]

    for make in (lambda: mx.optimizer.SGD(**options), lambda: mx.optimizer.RMSProp()):
        for groups, requests in (({"num_groups": 2}, 2), ({"groups": [[0, 5, 3], [1, 2]]}, 4)):
            wrapper = pickle.loads(pickle.dumps(hvd.DistributedOptimizer(make(), **groups)))
            update, alone = mx.optimizer.get_updater(wrapper), mx.optimizer.get_updater(make())
            mine, expected = [mx.nd.ones(s) for s in shapes], [mx.nd.ones(s) for s in shapes]
            for step in range(3):

                def reduce(step=step, update=update, mine=mine):
                    update(keys, gradients(step + hvd.rank()), mine)
                    mx.nd.waitall()

                assert requests_of(hvd, reduce) == requests
                alone(keys, gradients(step + 0.5), expected)
            for got, want in zip(mine, expected, strict=True):
                np.testing.assert_allclose(got.asnumpy(), want.asnumpy(), rtol=1e-5)


@pytest.mark.ranks(2)
def test_module_api(hvd, mx, np):
    hvd.init()
    data = mx.sym.Variable("data")
    hidden = mx.sym.Activation(mx.sym.FullyConnected(data, num_hidden=8, name="fc1"), act_type="tanh")
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=5, name="fc2"), name="softmax")

    def trained(members, opt):
        samples = len(members) * BATCH
        made = mx.mod.Module(symbol, context=mx.cpu())
        made.bind(data_shapes=[("data", (samples, 192))], label_shapes=[("softmax_label", (samples,))])
        mx.random.seed(hvd.rank() if len(members) == 1 else 0)
        made.init_params(mx.init.Normal(0.1))
        if len(members) == 1:
            arguments, auxiliary = made.get_params()
            hvd.broadcast_parameters(arguments)
            made.set_params(arguments, auxiliary)
        made.init_optimizer(optimizer=opt)
        for step in range(10):
            x, y = batch(mx, np, step, members)
            made.forward_backward(mx.io.DataBatch([x.reshape((samples, -1))], [y]))
            made.update()
        return [v.asnumpy() for _, v in sorted(made.get_params()[0].items())]

    options = {"learning_rate": 0.1, "momentum": 0.9}
    mine = trained(
        [hvd.rank()], hvd.DistributedOptimizer(mx.optimizer.SGD(**options, rescale_grad=1 / BATCH))
    )
    alone = trained([0, 1], mx.optimizer.SGD(**options, rescale_grad=1 / (2 * BATCH)))
    for got, want in zip(mine, alone, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert_same_bits_on_all_ranks(hvd, mine)


@pytest.mark.ranks(2, env={"MXNET_ENGINE_TYPE": "NaiveEngine"})
def test_naive_engine_runs_collectives_one_by_one(hvd, mx, np):
    hvd.init()
    net = convolutional(mx, np)
    train(mx, np, net, hvd.DistributedTrainer(net.collect_params(), "sgd", SGD), [hvd.rank()])
    assert_equal_to_joined_batch(hvd, mx, np, net, "sgd", SGD)
    with pytest.raises(hvd.RankMismatchError, match="Mismatched"):  # it has no later to raise at
        hvd.allreduce(mx.nd.ones(3 + hvd.rank()), name="w")
    assert hvd.allreduce(mx.nd.ones(2), name="w").asnumpy().tolist() == [1.0, 1.0]
