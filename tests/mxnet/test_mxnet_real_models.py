"""Models as they are used: ten steps on two ranks are ten steps of one process on the joined batch."""

from __future__ import annotations

import pytest
from mxnet_models import assert_same_bits_on_all_ranks, weights

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)


STEPS = 10
BATCH = 4  # of a rank


def compare(hvd, mx, np, make, sample, name, options, tolerance, hybrid=None, dtype="float32", **distributed):
    """Train ``make(is_distributed)`` on both; returns the trained network of this rank.

    ``sample(step, rank)`` gives the inputs and labels of a rank in a step.
    """
    loss_function = mx.gluon.loss.SoftmaxCrossEntropyLoss()

    def run(net, trainer, members):
        losses = []
        for step in range(STEPS):
            parts = [sample(step, rank) for rank in members]
            x, y = (mx.nd.array(np.concatenate(arrays), dtype=dtype) for arrays in zip(*parts, strict=True))
            with mx.autograd.record():
                loss = loss_function(net(x), y)
            loss.backward()
            trainer.step(len(x))
            losses.append(loss.mean().asscalar())
        return losses

    rank, size = hvd.rank(), hvd.size()

    def made(is_distributed, seed):
        mx.random.seed(seed)
        net = make(is_distributed)
        net.cast(dtype)
        net.initialize(mx.init.Xavier())
        if hybrid is not None:
            net.hybridize(**hybrid)
        if is_distributed:
            hvd.broadcast_parameters(net.collect_params())
        net(mx.nd.array(sample(0, 0)[0], dtype=dtype))  # shapes
        return net

    net, alone = made(True, 1 + rank), made(False, 1)
    for got, start in zip(net.collect_params().values(), alone.collect_params().values(), strict=True):
        start.set_data(got.data())  # deferred initialisation draws in another order
    before = weights(np, alone)
    trainer = hvd.DistributedTrainer(net.collect_params(), name, dict(options), **distributed)
    mine = run(net, trainer, [rank])
    plain = mx.gluon.Trainer(alone.collect_params(), name, dict(options), kvstore=None)
    joined = run(alone, plain, range(size))
    np.testing.assert_allclose(np.mean(hvd.allgather_object(mine), axis=0), joined, rtol=tolerance)
    moved = 0
    for got, want, start in zip(weights(np, net), weights(np, alone), before, strict=True):
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * np.abs(want).max())
        moved += (want != start).any()
    assert moved > len(before) / 2
    assert_same_bits_on_all_ranks(hvd, weights(np, net))


@pytest.mark.ranks(2)
@pytest.mark.slow
def test_a_residual_network_with_synchronized_batch_norm(hvd, mx, np):
    hvd.init()

    def make(is_distributed):
        net = mx.gluon.model_zoo.vision.resnet18_v1(classes=10)
        return hvd.SyncBatchNorm.convert(net) if is_distributed else net

    def sample(step, rank):
        random = np.random.RandomState(100 * step + rank)
        return random.randn(BATCH, 3, 32, 32), random.randint(0, 10, BATCH)

    # In float32 this network makes percents of a rounding error within ten steps.
    options = {"learning_rate": 0.01, "momentum": 0.9, "wd": 1e-4}
    how = {"hybrid": {"static_alloc": True}, "dtype": "float64", "num_groups": 4}
    compare(hvd, mx, np, make, sample, "sgd", options, 1e-5, **how)


WORDS = 5000


@pytest.mark.ranks(2)
def test_an_lstm_with_a_large_sparse_embedding(hvd, mx, np):
    hvd.init()

    class Tagger(mx.gluon.Block):
        def __init__(self):
            super().__init__()
            self.embedding = mx.gluon.nn.Embedding(WORDS, 16, sparse_grad=True)
            self.lstm = mx.gluon.rnn.LSTM(24, layout="NTC", num_layers=2)
            self.dense = mx.gluon.nn.Dense(6)

        def forward(self, x):
            return self.dense(self.lstm(self.embedding(x))[:, -1])

    def sample(step, rank):
        random = np.random.RandomState(100 * step + rank)
        return random.zipf(1.3, (BATCH, 9)) % WORDS, random.randint(0, 6, BATCH)

    for name, options in (("sgd", {"learning_rate": 0.5}), ("adam", {"learning_rate": 0.01})):
        compare(hvd, mx, np, lambda _: Tagger(), sample, name, options, 2e-3)


@pytest.mark.ranks(2)
def test_a_perceptron(hvd, mx, np):
    hvd.init()

    def make(_):
        net = mx.gluon.nn.HybridSequential()
        for units in (32, 32):
            net.add(mx.gluon.nn.Dense(units, activation="relu"))
        net.add(mx.gluon.nn.Dropout(0.0), mx.gluon.nn.LayerNorm(), mx.gluon.nn.Dense(10))
        return net

    def sample(step, rank):
        random = np.random.RandomState(100 * step + rank)
        return random.randn(BATCH, 20), random.randint(0, 10, BATCH)

    for hybrid in (None, {"static_alloc": True, "static_shape": True}):
        compare(hvd, mx, np, make, sample, "adam", {"learning_rate": 0.01}, 1e-3, hybrid)
