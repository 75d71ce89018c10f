"""Gluon's estimator over several ranks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from mxnet_models import assert_same_bits_on_all_ranks, weights

pytestmark = pytest.mark.ranks(framework="mxnet", timeout_s=180)

EPOCHS = 3


def data_of(mx, np, members):
    """A loader of the ranks' samples: blobs of three classes."""
    samples, batch, random = 24, 4, np.random.RandomState(3)
    labels = random.randint(0, 3, samples)
    points = (random.randn(samples, 5) + 2 * labels[:, None]).astype("float32")
    parts = np.arange(samples).reshape(-1, 2, batch)[:, members].reshape(-1)
    dataset = mx.gluon.data.ArrayDataset(points[parts], labels[parts].astype("float32"))
    return mx.gluon.data.DataLoader(dataset, batch * len(members))


def estimator_of(mx, np, seed, make_trainer, deferred=False):
    from mxnet.gluon.contrib.estimator import Estimator

    net = mx.gluon.nn.HybridSequential()
    net.add(
        mx.gluon.nn.Dense(8, activation="relu", in_units=0 if deferred else 5),
        mx.gluon.nn.Dense(3, in_units=8),
    )
    mx.random.seed(seed)
    net.initialize(mx.init.Normal(0.3))
    return Estimator(
        net,
        mx.gluon.loss.SoftmaxCrossEntropyLoss(),
        train_metrics=[mx.metric.Accuracy(), mx.metric.Perplexity(None)],
        val_metrics=mx.metric.Accuracy(),
        trainer=make_trainer(net.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}),
        context=mx.cpu(),
    )


@pytest.mark.ranks(2)
def test_fitting_equals_one_process_with_the_joined_data(hvd, mx, np):
    from mxnet.gluon.contrib.estimator import EpochEnd

    class Recorder(EpochEnd):
        def __init__(self):
            self.found = []

        def epoch_end(self, estimator, *args, **kwargs):
            self.found += [m.get()[1] for m in estimator.train_metrics + estimator.val_metrics]

    hvd.init()
    rank = hvd.rank()
    mine, joined = Recorder(), Recorder()
    distributed = estimator_of(mx, np, 1 + rank, hvd.DistributedTrainer)
    distributed.fit(
        data_of(mx, np, [rank]),
        data_of(mx, np, [rank]),
        epochs=EPOCHS,
        event_handlers=[mine, hvd.estimator.BroadcastHandler(), hvd.estimator.MetricAverageHandler()],
    )
    alone = estimator_of(mx, np, 1, lambda *a: mx.gluon.Trainer(*a, kvstore=None))
    alone.fit(data_of(mx, np, [0, 1]), data_of(mx, np, [0, 1]), epochs=EPOCHS, event_handlers=[joined])
    np.testing.assert_allclose(mine.found, joined.found, rtol=1e-4)
    assert len(set(hvd.allgather_object(tuple(mine.found)))) == 1
    for got, want in zip(weights(np, distributed.net), weights(np, alone.net), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    assert_same_bits_on_all_ranks(hvd, weights(np, distributed.net))


@pytest.mark.ranks(2)
def test_fitting_with_deferred_initialisation(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    made = estimator_of(mx, np, 1 + rank, hvd.DistributedTrainer, deferred=True)
    logged = []
    made.fit(
        data_of(mx, np, [rank]),
        epochs=1,
        event_handlers=[
            hvd.estimator.BroadcastHandler(),
            hvd.estimator.MetricAverageHandler(),
            hvd.estimator.LogMetricsHandler(lambda values, step: logged.append((step, values)), 2),
        ],
    )
    assert_same_bits_on_all_ranks(hvd, weights(np, made.net))
    assert [step for step, _ in logged] == ([2] if rank == 0 else [])
    assert all(values["polyhvd/ranks"] == 2 for _, values in logged)


@pytest.mark.ranks(2)
def test_metrics_are_averaged_by_samples(hvd, mx, np):
    hvd.init()
    rank = hvd.rank()
    made = [mx.metric.Accuracy(), mx.metric.F1(average="macro"), mx.metric.CompositeEvalMetric(["mse", "ce"])]
    if rank == 1:  # rank 0 has seen nothing
        made[0].update([mx.nd.array([0, 1, 1])], [mx.nd.array([[1, 0], [0, 1], [1, 0]])])
    hvd.estimator.average_metrics(made)
    assert made[0].get() == ("accuracy", pytest.approx(2 / 3))
    made[0].reset()
    made[0].update([mx.nd.zeros(1 + rank)], [mx.nd.array([[1 - rank, rank]] * (1 + rank))])
    hvd.estimator.average_metrics(made[0])
    assert made[0].get()[1] == pytest.approx(1 / 3)  # by samples, not by ranks
    for wrong in (mx.metric.F1(average="micro"), mx.metric.PCC()):
        with pytest.raises(hvd.InvalidArgumentError, match="is not a sum over samples"):
            hvd.estimator.average_metrics([wrong])
    with pytest.raises(
        hvd.RankMismatchError, match=r"rank 0 has no others; rank 1 has 'accuracy \(2\)'; use the"
    ):
        hvd.estimator.average_metrics([mx.metric.Accuracy() for _ in range(1 + rank)])
    near, far = mx.metric.Loss("near"), mx.metric.Loss("far")
    near.update(None, mx.nd.ones(2))
    far.update(None, mx.nd.full(2, 100))
    hvd.estimator.average_metrics([near, far] if rank else [far, near])
    assert (near.get()[1], far.get()[1]) == (1, 100)


@pytest.mark.ranks(2)
def test_four_threads_may_average_metrics_at_once(hvd, mx, np):
    hvd.init()
    made = [mx.metric.Accuracy() for _ in range(100)]
    for metric in made:
        metric.update([mx.nd.zeros(4)], [mx.nd.array([[1 - hvd.rank(), hvd.rank()]] * 4)])
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(hvd.estimator.average_metrics, made))
    assert [metric.get()[1] for metric in made] == [0.5] * 100


@pytest.mark.ranks(2)
@pytest.mark.parametrize("initialised", [0, 1])
def test_a_network_that_only_some_ranks_have_initialised_is_an_error_on_every_rank(hvd, mx, np, initialised):
    hvd.init()
    made = estimator_of(mx, np, 1, hvd.DistributedTrainer, deferred=True)
    if hvd.rank() == initialised:  # as after net.load_parameters()
        made.net(mx.nd.zeros((1, 5)))
    message = rf"ranks \[{1 - initialised}\] have parameters without values, and ranks \[{initialised}\]"
    with pytest.raises(hvd.RankMismatchError, match=message):
        made.fit(data_of(mx, np, [hvd.rank()]), epochs=1, event_handlers=[hvd.estimator.BroadcastHandler()])
