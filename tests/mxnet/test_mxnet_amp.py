"""Mixed precision: what overflows on one rank overflows on all, and all skip alike."""

from __future__ import annotations

import pytest
from mxnet_models import assert_same_bits_on_all_ranks, convolutional, weights

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


SGD = {"learning_rate": 1.0, "momentum": 0.9}
STEPS = 8
#: The ranks that overflow, by step.
OVERFLOWS = {2: 1, 3: 0, 6: 1}


def network(mx, np):
    """Its last product is computed in float16: a CPU has no other operators of these with a weight."""

    class Scaled(mx.gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.body = convolutional(mx, np)
            self.factor = self.params.get("factor", shape=(1, 5), init=mx.init.Constant(0.7))

        def hybrid_forward(self, F, x, factor):
            return F.broadcast_mul(self.body(x), factor)

    net = Scaled()
    net.factor.initialize()
    return net


def begin(amp):
    amp.init(target_dtype="float16", target_precision_ops=["broadcast_mul"])


def samples(mx, np, step, ranks):
    parts = [np.random.RandomState(100 * step + r).randn(4, 3, 8, 8) for r in ranks]
    return mx.nd.array(np.concatenate(parts))


def steps(hvd, mx, np, amp, net, trainer, ranks, unscales=False):
    """Weights and loss scales after each step."""
    found = []
    for step in range(STEPS):
        x = samples(mx, np, step, ranks)
        factor = np.full((len(x), 5), 1e-2)
        if OVERFLOWS.get(step) in ranks:
            factor[4 * ranks.index(OVERFLOWS[step])] = float("inf")
        with mx.autograd.record():
            y = net(x)
            assert y.dtype == np.float16
            loss = mx.nd.elemwise_mul(y.astype("float32"), mx.nd.array(factor))
            with amp.scale_loss(loss, trainer) as scaled:
                mx.autograd.backward(scaled)
        if unscales:
            trainer.allreduce_grads()
            amp.unscale(trainer)
            gradients = [p.grad() for p in net.collect_params().values()]
            if all(np.isfinite(g.asnumpy()).all() for g in gradients):
                mx.gluon.utils.clip_global_norm(gradients, 1.0)
            trainer.update(1)
        else:
            trainer.step(len(x))
        found.append((weights(np, net), trainer._amp_loss_scaler.loss_scale))
    return found


@pytest.mark.ranks(2)
def test_all_ranks_skip_the_step_that_overflows_on_one(hvd, mx, np):
    from mxnet.contrib import amp

    hvd.init()
    begin(amp)
    rank = hvd.rank()
    for unscales in (False, True):
        alone = network(mx, np)
        plain = mx.gluon.Trainer(alone.collect_params(), "sgd", SGD, kvstore=None)
        amp.init_trainer(plain)
        expected = steps(hvd, mx, np, amp, alone, plain, [0, 1])
        net = network(mx, np)
        net.hybridize()
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", SGD)
        amp.init_trainer(trainer)
        found = steps(hvd, mx, np, amp, net, trainer, [rank], unscales)
        before = weights(np, network(mx, np))
        for step, ((got, scale), (want, want_scale)) in enumerate(zip(found, expected, strict=True)):
            changed = any((a != b).any() for a, b in zip(got, before, strict=True))
            assert changed == (step not in OVERFLOWS), step
            assert scale == want_scale
            if not unscales:
                for a, b in zip(got, want, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)
            assert_same_bits_on_all_ranks(hvd, got)
            before = got
        assert found[-1][1] == 2.0**13


@pytest.mark.ranks(2)
def test_a_gradient_that_stays_local_skips_the_step_on_all_ranks(hvd, mx, np):
    from mxnet.contrib.amp.loss_scaler import LossScaler

    hvd.init()
    nets = [mx.gluon.nn.Dense(1, in_units=1, use_bias=False) for _ in range(2)]
    for net in nets:
        net.initialize(mx.init.One())
    trainer = hvd.DistributedTrainer([net.weight for net in nets], "sgd", {"learning_rate": 1.0})
    trainer.register_local_var(nets[1].weight)
    trainer._amp_loss_scaler, trainer._amp_original_scale = LossScaler(), trainer._scale
    for bad in (1, 0, None):
        before = [net.weight.data().asscalar() for net in nets]
        with mx.autograd.record():
            factor = float("inf") if hvd.rank() == bad else 1.0
            loss = nets[0](mx.nd.ones((1, 1))) + nets[1](mx.nd.ones((1, 1)) * factor)
        loss.backward()
        trainer.step(1)
        after = [net.weight.data().asscalar() for net in nets]
        assert (after == before) == (bad is not None)
    assert trainer._amp_loss_scaler.loss_scale == 2.0**14


@pytest.mark.ranks(2)
def test_an_overflow_in_one_pass_skips_the_whole_step(hvd, mx, np):
    from mxnet.contrib.amp.loss_scaler import LossScaler

    hvd.init()
    net = mx.gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.One())
    trainer = hvd.DistributedTrainer(
        net.collect_params(), "sgd", {"learning_rate": 1.0}, backward_passes_per_step=2
    )
    trainer._amp_loss_scaler, trainer._amp_original_scale = LossScaler(), trainer._scale
    for turn in range(6):
        with mx.autograd.record():
            factor = float("inf") if turn == 2 and hvd.rank() == 1 else 1.0
            loss = net(mx.nd.ones((1, 1)) * factor)
        loss.backward()
        trainer.step(1)
    assert net.weight.data().asscalar() == 1 - 2 - 2  # the second step was skipped, both its passes


@pytest.mark.ranks(2)
def test_the_loss_scale_is_broadcast_with_the_states(hvd, mx, np):
    from mxnet.contrib import amp

    hvd.init()
    begin(amp)
    net = convolutional(mx, np)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd")
    amp.init_trainer(trainer)
    trainer._amp_loss_scaler._loss_scale = 2.0 ** (3 + hvd.rank())
    hvd.broadcast_optimizer_state(trainer, root_rank=1)
    assert trainer._amp_loss_scaler.loss_scale == 16.0


@pytest.mark.ranks(2)
def test_an_optimizer_in_a_plain_trainer_refuses_a_loss_scaler(hvd, mx, np):
    from mxnet.contrib.amp.loss_scaler import LossScaler

    hvd.init()
    net = mx.gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize(mx.init.One())
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0))
    trainer = mx.gluon.Trainer(net.collect_params(), optimizer, kvstore=None)
    trainer._amp_loss_scaler, trainer._amp_original_scale = LossScaler(), trainer._scale
    with mx.autograd.record():
        loss = net(mx.nd.ones((1, 1)))
    loss.backward()
    with pytest.raises(mx.base.MXNetError, match=r"to DistributedTrainer\(params, optimizer\)"):
        trainer.step(1)
    assert net.weight.data().asscalar() == 1
