"""Estimators of Gluon on two executors: what differs from those of PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import spark_common
from pyspark.ml import Pipeline, PipelineModel
from pyspark.sql import functions
from spark_common import (
    check_killed_and_resumed,
    check_names,
    columns,
    elastic_fit,
    example_accuracy,
    files_in,
    write_points,
)

import polyhvd.mxnet  # isort: skip  # before MXNet, which needs names that NumPy has no more
import mxnet as mx
from mxnet import gluon

import polyhvd.spark
from polyhvd.data import ParquetLoader
from polyhvd.spark.mxnet import GluonEstimator, GluonModel

for module in (spark_common, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)


def network(*layers: Any) -> Any:
    import polyhvd.mxnet  # noqa: F401  # isort: skip
    import mxnet as mx
    from mxnet import gluon

    mx.random.seed(4)
    net = gluon.nn.HybridSequential()
    net.add(*layers)
    net.initialize(mx.init.Xavier())
    return net


def regression(**values: Any) -> GluonEstimator:
    given = {
        "backend": polyhvd.spark.LocalBackend(2),
        "model": network(gluon.nn.Dense(1, in_units=4)),
        "optimizer": mx.optimizer.SGD(learning_rate=0.05, momentum=0.5),
        "loss": gluon.loss.L2Loss(),
        "feature_cols": ["array"],
        "label_cols": ["height"],
        "random_seed": 7,
        "verbose": 0,
    }
    return GluonEstimator(**{**given, **values})


def weights_of(fitted: GluonModel) -> list[Any]:
    return [value.data().asnumpy().tolist() for value in fitted.getModel().collect_params().values()]


def test_a_classifier_is_fitted_on_the_executors_saved_and_loaded(
    frame: Any, store: Any, tmp_path: Path
) -> None:
    layers = gluon.nn.Dense(8, activation="tanh", in_units=4), gluon.nn.BatchNorm(in_channels=8)
    net = network(*layers, gluon.nn.Dense(2, in_units=8))
    net.hybridize()
    net(mx.nd.zeros((1, 4)))  # which compiles it
    estimator = GluonEstimator(
        backend=polyhvd.spark.SparkBackend(num_proc=2),
        store=store,
        model=net,
        optimizer="adam",
        loss=gluon.loss.SoftmaxCrossEntropyLoss(),
        metrics=["acc"],
        feature_cols=["vector"],
        label_cols=["side"],
        validation="held",
        batch_size=8,
        epochs=6,
        verbose=0,
        random_seed=1,
    )
    pipeline = Pipeline(stages=[estimator]).fit(frame)
    fitted = pipeline.stages[0]
    history = fitted.getHistory()
    assert [entry["epoch"] for entry in history] == [0, 1, 2, 3, 4, 5]
    assert history[-1]["train"]["loss"] < history[0]["train"]["loss"]
    assert history[-1]["validation"]["accuracy"] > 0.85
    rows = pipeline.transform(frame).select("array", "side", "side__output").collect()
    outputs = np.array([row.side__output.toArray() for row in rows])
    wanted = fitted.getModel()(mx.nd.array([row.array for row in rows])).asnumpy()
    np.testing.assert_allclose(outputs, wanted, rtol=1e-4, atol=1e-6)
    pipeline.save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    assert loaded.stages[0].getHistory() == history
    assert loaded.transform(frame).select("array", "side", "side__output").collect() == rows
    estimator.save(str(tmp_path / "estimator"))
    again = GluonEstimator.load(str(tmp_path / "estimator"))
    assert again.getOptimizer() == "adam"
    assert weights_of(again) == weights_of(estimator)


def reference(folder: str, epochs: int) -> list[Any]:
    """The training of :func:`regression`, by hand."""
    import polyhvd.mxnet as hvd  # isort: skip
    import mxnet as mx
    from mxnet import gluon

    hvd.init()
    net = network(gluon.nn.Dense(1, in_units=4))
    hvd.broadcast_parameters(net.collect_params())
    optimizer = mx.optimizer.SGD(learning_rate=0.05 * hvd.size(), momentum=0.5)
    trainer = hvd.DistributedTrainer(net.collect_params(), optimizer)
    loader = ParquetLoader(folder, columns=["x", "y"], batch_size=8, seed=7, transform=columns)
    criterion = gluon.loss.L2Loss()
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in loader:
            x, y = (mx.nd.array(batch[name]) for name in ("x", "y"))
            with mx.autograd.record():
                loss = batch.weight * criterion(net(x), y).mean()
            loss.backward()
            trainer.step(1)
    weights = [value.data().asnumpy().tolist() for value in net.collect_params().values()]
    hvd.shutdown()
    return weights


@pytest.mark.usefixtures("ranks_in_forks")
def test_a_fit_on_files_equals_a_training_by_hand_and_resumes_where_it_was(store: Any) -> None:
    write_points(store)
    wanted = polyhvd.run(reference, (store.get_train_data_path(), 3), num_proc=2)
    given = {"store": store, "feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8}
    first = regression(**given, epochs=1, run_id="named").fit_on_parquet()
    resumed = regression(**given, epochs=3, run_id="named").fit_on_parquet()
    assert weights_of(resumed) == wanted[0] == wanted[1]
    history = resumed.getHistory()
    assert history[:1] == first.getHistory()
    assert [entry["epoch"] for entry in history] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"run_id 'named', with other values of optimizer"):
        regression(**given, run_id="named", optimizer="sgd").fit_on_parquet()


@pytest.mark.nightly
def test_an_elastic_fit_outlives_a_worker_and_uses_each_row_once(frame: Any, tmp_path: Path) -> None:
    metric = mx.metric.CustomMetric(lambda label, output: (float(label.sum()), len(label)))
    estimator = regression(metrics=[metric], epochs=4, batch_size=16, validation="held")
    history = elastic_fit(estimator, frame, tmp_path).getHistory()
    wanted = np.mean([row.height for row in frame.where("not held").select("height").collect()])
    assert [entry["epoch"] for entry in history] == [0, 1, 2, 3]
    for entry in history:
        found = entry["train"]["custom(<lambda>)"]
        assert found == pytest.approx(wanted, rel=1e-5), "each row has been used once"
    assert history[-1]["train"]["loss"] < 0.1 * history[0]["train"]["loss"]


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_a_killed_rank_is_one_error_and_the_next_fit_resumes(store: Any, tmp_path: Path) -> None:
    check_killed_and_resumed(regression, weights_of, store, tmp_path)


class Two(gluon.nn.HybridBlock):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = gluon.nn.Dense(1, in_units=4), gluon.nn.Embedding(2, 1)

    def hybrid_forward(self, F: Any, array: Any, whole: Any) -> Any:
        return self.first(array), self.second(whole).reshape((-1, 1))


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_several_columns_passes_weights_and_metrics_are_used(frame: Any, store: Any) -> None:
    estimator = regression(
        store=store,
        model=network(Two()),
        loss=[gluon.loss.L2Loss(), lambda output, label: (output - label) ** 2],
        loss_weights=[1.0, 0.5],
        feature_cols=["array", "side"],
        categorical_cols=["side"],
        input_shapes=[[-1, 4], [-1]],
        label_cols=["height", "side"],
        metrics=[mx.metric.MAE(), lambda label, output: float(label.mean())],
        sample_weight_col="d",
        validation=0.25,
        backward_passes_per_step=2,
    )
    fitted = estimator.fit(frame.withColumn("d", functions.lit(0.0)))
    assert weights_of(fitted) == weights_of(estimator)  # no row has a weight
    names = {"loss", "height_mae", "height_custom(<lambda>)", "side_mae", "side_custom(<lambda>)"}
    assert set(fitted.getHistory()[0]["validation"]) == names
    types = dict(fitted.transform(frame).dtypes)
    assert (types["height__output"], types["side__output"]) == ("double", "bigint")
    weighted = estimator.setEpochs(2).fit(frame.withColumn("d", functions.lit(1.0))).getHistory()
    assert weighted[1]["train"]["loss"] < weighted[0]["train"]["loss"]


LAZY = gluon.nn.Dense(1)
LAZY.initialize()
BAD = {
    "another model": ({"feature_cols": ["a"]}, r"the model does not accept batches of a \[32\]"),
    "two labels": ({"label_cols": ["height", "a"]}, "the model has 1 outputs for the 2 label columns"),
    "a network without shapes": ({"model": LAZY}, "has no value yet; initialize the network, and call it"),
    "no network": ({"model": 3}, "model is a int; expected a mxnet.gluon.Block"),
    "no loss": ({"loss": None}, "loss is missing"),
    "no optimizer": ({"optimizer": None}, "optimizer is a NoneType; expected the name of one"),
    "nulls": ({"feature_cols": ["holes"]}, "column 'holes' has nulls"),
    "strings": ({"feature_cols": ["text"]}, "'text' of type string; .*StringIndexer"),
}
#: Those that are not seen before ranks or tasks of Spark are started.
LONG = ("another model", "two labels", "nulls")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.nightly if case in LONG else []) for case in BAD]
)
@pytest.mark.usefixtures("ranks_in_forks")
def test_bad_input_is_one_error_and_leaves_nothing(case: str, frame: Any, store: Any, tmp_path: Path) -> None:
    values, text = BAD[case]
    changed = frame.withColumn("holes", functions.when(frame.a > 0, frame.a)).withColumn(
        "text", functions.lit("x")
    )
    with pytest.raises(ValueError, match=text):
        regression(store=store, **values).fit(changed)
    assert files_in(tmp_path) == []


@pytest.mark.nightly
def test_the_example_trains_and_predicts() -> None:
    assert example_accuracy("spark_gluon.py") > 0.9


def test_the_module_offers_what_was_recorded() -> None:
    check_names("polyhvd.spark.mxnet")
