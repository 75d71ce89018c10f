"""Networks, batches and oracles that the tests of training share. Nothing here imports a framework."""

from __future__ import annotations

import hashlib

BATCH = 4  # of a rank


def convolutional(mx, np, seed=1):
    """A small network with known shapes, initialised from a seed."""
    net = mx.gluon.nn.HybridSequential()
    net.add(
        mx.gluon.nn.Conv2D(8, 3, in_channels=3, activation="relu"),
        mx.gluon.nn.Conv2D(8, 3, in_channels=8),
        mx.gluon.nn.Flatten(),
        mx.gluon.nn.Dense(16, in_units=8 * 4 * 4, activation="tanh"),
        mx.gluon.nn.Dense(5, in_units=16),
    )
    net.initialize()
    fill(mx, np, net, seed)
    return net


def fill(mx, np, net, seed):
    """Set all parameters from a seed, in the order of the model."""
    random = np.random.RandomState(seed)
    for parameter in net.collect_params().values():
        parameter.set_data(mx.nd.array(random.randn(*parameter.shape) * 0.1))


def batch(mx, np, step, ranks):
    """The samples of some ranks in a step."""
    pairs = [np.random.RandomState(1000 * step + r) for r in ranks]
    x = np.concatenate([p.randn(BATCH, 3, 8, 8) for p in pairs])
    y = np.concatenate([p.randint(0, 5, BATCH) for p in pairs])
    return mx.nd.array(x), mx.nd.array(y)


def train(mx, np, net, trainer, ranks, steps=20):
    """Steps on the ranks' samples."""
    loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    for step in range(steps):
        x, y = batch(mx, np, step, ranks)
        with mx.autograd.record():
            loss = loss_function(net(x), y)
        loss.backward()
        trainer.step(len(x))


def weights(np, net):
    return [p.data().asnumpy() for p in net.collect_params().values()]


def assert_same_bits_on_all_ranks(hvd, arrays):
    mine = hashlib.sha256(b"".join(a.tobytes() for a in arrays)).digest()
    assert all(other == mine for other in hvd.allgather_object(mine))


def assert_equal_to_joined_batch(hvd, mx, np, net, name, options, steps=20):
    """``net`` has been trained with ``options``; train another in this process alone."""
    alone = convolutional(mx, np)
    trainer = mx.gluon.Trainer(alone.collect_params(), name, dict(options), kvstore=None)
    train(mx, np, alone, trainer, range(hvd.size()), steps)
    for got, expected in zip(weights(np, net), weights(np, alone), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    assert_same_bits_on_all_ranks(hvd, weights(np, net))


def elementwise(mx, dtype="float32", shape=(4, 3)):
    """A network of one product and one sum, which MXNet computes in float16 on a CPU too."""

    class Affine(mx.gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            self.weight = self.params.get("weight", shape=shape, init=mx.init.Constant(0.5))
            self.bias = self.params.get("bias", shape=shape, init=mx.init.Zero())

        def hybrid_forward(self, F, x, weight, bias):
            return x * weight + bias

    net = Affine()
    net.initialize()
    net.cast(dtype)
    return net
