"""Estimators of Keras on two executors: what differs from those of PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import keras
import numpy as np
import pytest
import spark_common
import tensorflow
from polyhvd.keras import spark as keras_spark
from pyspark.ml import Pipeline, PipelineModel
from spark_common import (
    check_ended_by_a_callback,
    check_killed_and_resumed,
    check_names,
    elastic_fit,
    example_accuracy,
    write_points,
)

import polyhvd.spark
from polyhvd.data import ParquetLoader
from polyhvd.spark.estimators.estimator import _OF_RANKS
from polyhvd.spark.keras import KerasEstimator, KerasModel

for module in (spark_common, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)


def regression(**values: Any) -> KerasEstimator:
    keras.utils.set_random_seed(4)
    given = {
        "backend": polyhvd.spark.LocalBackend(2),
        "model": keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]),
        "optimizer": keras.optimizers.SGD(0.05, momentum=0.5),
        "loss": "mse",
        "feature_cols": ["array"],
        "label_cols": ["height"],
        "random_seed": 7,
        "verbose": 0,
    }
    return KerasEstimator(**{**given, **values})


def weights_of(fitted: KerasModel) -> list[Any]:
    return [value.tolist() for value in fitted.getModel().get_weights()]


def test_a_classifier_is_fitted_on_the_executors_saved_and_loaded(
    frame: Any, store: Any, tmp_path: Path
) -> None:
    layers = [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2, "softmax")]
    estimator = KerasEstimator(
        backend=polyhvd.spark.SparkBackend(num_proc=2),
        store=store,
        model=keras.Sequential(layers),
        optimizer=keras.optimizers.Adam(0.02),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy", keras.metrics.SparseCategoricalAccuracy(name="same")],
        feature_cols=["array"],
        label_cols=["side"],
        validation="held",
        batch_size=16,
        epochs=4,
        verbose=0,
        random_seed=1,
    )
    pipeline = Pipeline(stages=[estimator]).fit(frame)
    fitted = pipeline.stages[0]
    history = fitted.getHistory()
    assert {name: len(values) for name, values in history.items()} == dict.fromkeys(
        ("accuracy", "loss", "same", "val_accuracy", "val_loss", "val_same"), 4
    )
    assert history["val_accuracy"][-1] > 0.9
    rows = pipeline.transform(frame).select("array", "side", "side__output").collect()
    outputs = np.array([row.side__output.toArray() for row in rows])
    wanted = fitted.getModel().predict(np.array([row.array for row in rows]), verbose=0)
    np.testing.assert_allclose(outputs, wanted, rtol=1e-5)
    pipeline.save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    assert loaded.stages[0].getHistory() == history
    assert loaded.transform(frame).select("array", "side", "side__output").collect() == rows
    estimator.save(str(tmp_path / "estimator"))
    again = KerasEstimator.load(str(tmp_path / "estimator"))
    assert again.getOptimizer().get_config() == estimator.getOptimizer().get_config()
    assert again.getModel().count_params() == estimator.getModel().count_params()


def reference(folder: str, epochs: int) -> list[Any]:
    """The training of :func:`regression`, by hand."""
    import keras
    import polyhvd.keras as hvd
    from polyhvd.keras.data import Batches

    hvd.init()
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.SGD(0.05 * hvd.size(), momentum=0.5)
    model.compile(hvd.DistributedOptimizer(optimizer), "mse")
    loader = ParquetLoader(folder, columns=["x", "y"], batch_size=8, seed=7, transform=with_an_axis)
    data = Batches(loader, x="x", y="y").dataset()
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.DataPositionCallback(loader),
    ]
    model.fit(data, epochs=epochs, verbose=0, callbacks=callbacks)
    weights = [value.tolist() for value in model.get_weights()]
    hvd.shutdown()
    return weights


def with_an_axis(arrays: dict[str, Any]) -> dict[str, Any]:
    return {"x": arrays["x"].astype(np.float32), "y": arrays["y"].astype(np.float32)[:, None]}


@pytest.mark.usefixtures("ranks_in_forks")
def test_a_fit_on_files_equals_a_training_by_hand_and_resumes_where_it_was(store: Any) -> None:
    write_points(store)
    wanted = polyhvd.run(reference, (store.get_train_data_path(), 3), num_proc=2)
    given = {"store": store, "feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8}
    first = regression(**given, epochs=1, run_id="named").fit_on_parquet()
    resumed = regression(**given, epochs=3, run_id="named").fit_on_parquet()
    assert weights_of(resumed) == wanted[0] == wanted[1]
    losses = resumed.getHistory()["loss"]
    assert losses[:1] == first.getHistory()["loss"]
    assert len(losses) == 3


def test_a_rank_selects_its_gpu_before_it_makes_the_model(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    load = keras_spark._Saved.load
    monkeypatch.setattr(keras_spark, "_select_gpu", lambda is_used: calls.append(f"select {is_used}"))
    monkeypatch.setattr(keras_spark._Saved, "load", lambda *given: calls.append("load") or load(*given))
    estimator = regression(store=store)
    params = {name: estimator.getOrDefault(name) for name in _OF_RANKS} | {"use_gpu": False}
    job = SimpleNamespace(payload=estimator._payload(), params=params)
    calls.clear()
    keras_spark._KerasTrainer.preparing(job)
    assert calls == ["select False", "load"]


@pytest.mark.parametrize(("is_used", "wanted"), [(True, ["gpu 1"]), (False, [])])
def test_a_rank_sees_its_own_gpu_or_none(
    is_used: bool, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(polyhvd, "local_rank", lambda: 3)
    monkeypatch.setattr(tensorflow.config, "list_physical_devices", lambda kind: ["gpu 0", "gpu 1"])
    monkeypatch.setattr(tensorflow.config, "set_visible_devices", lambda *given: seen.append(given))
    keras_spark._select_gpu(is_used)
    assert seen == [(wanted, "GPU")]


@pytest.mark.nightly
def test_an_elastic_fit_outlives_a_worker(frame: Any, tmp_path: Path) -> None:
    stopping = keras.callbacks.EarlyStopping("loss", patience=9)
    estimator = regression(epochs=4, batch_size=16, validation="held", callbacks=[stopping])
    history = elastic_fit(estimator, frame, tmp_path).getHistory()
    assert {name: len(values) for name, values in history.items()} == {"loss": 4, "val_loss": 4}
    assert history["loss"][-1] < 0.1 * history["loss"][0]


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_a_killed_rank_is_one_error_and_the_next_fit_resumes(store: Any, tmp_path: Path) -> None:
    check_killed_and_resumed(regression, weights_of, store, tmp_path)


class Doubled(keras.layers.Layer):
    def call(self, values: Any) -> Any:
        return 2 * values


class Stopping(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.set_weights([0 * value + epoch for value in self.model.get_weights()])
        self.model.stop_training = epoch == 1


@pytest.mark.usefixtures("ranks_in_forks")
def test_a_fit_that_a_callback_has_ended_is_completed(store: Any) -> None:
    further = check_ended_by_a_callback(regression, store, Stopping())
    assert len(further.getHistory()["loss"]) == 5


def tiny(labels: Any, outputs: Any) -> Any:
    """A loss whose gradients are zero in float16, unless it is scaled."""
    return 1e-9 * keras.losses.mean_squared_error(labels, outputs)


@pytest.mark.parametrize("name", ["policy", pytest.param("optimizer", marks=pytest.mark.nightly)])
@pytest.mark.usefixtures("ranks_in_forks")
def test_a_fit_in_float16_scales_losses_and_resumes_at_the_same_rate(name: str, store: Any) -> None:
    write_points(store)

    def estimator(epochs: int, run_id: str) -> KerasEstimator:
        optimizer = keras.optimizers.SGD(1e7, momentum=0.5)
        if name == "optimizer":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        given = {"optimizer": optimizer, "loss": tiny, "feature_cols": ["x"], "label_cols": ["y"]}
        keras.config.set_dtype_policy("mixed_float16")
        try:
            return regression(**given, store=store, epochs=epochs, run_id=run_id, batch_size=8)
        finally:
            keras.config.set_dtype_policy("float32")

    first = estimator(1, "mine")
    found = weights_of(first.fit_on_parquet())
    assert found != [value.tolist() for value in first.getModel().get_weights()]
    resumed, whole = (estimator(2, run_id).fit_on_parquet() for run_id in ("mine", "whole"))
    assert weights_of(resumed) == weights_of(whole)


def test_predictions_are_in_the_order_of_the_models_outputs() -> None:
    given = keras.Input((1,))
    outputs = {name: keras.layers.Rescaling(factor)(given) for name, factor in (("b", 2.0), ("a", 1.0))}
    model = keras.Model(given, outputs)
    fitted = KerasModel(model=model, feature_columns=["x"], label_columns=["first", "second"])
    wanted = keras.Model(given, model.outputs)(np.ones((1, 1)))  # which fit() pairs with the labels
    found = fitted._predictor()()([np.ones((1, 1))])  # as in the tasks of transform()
    assert [output.tolist() for output in found] == [
        keras.ops.convert_to_numpy(output).tolist() for output in wanted
    ]


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_own_layers_callbacks_and_several_columns_are_used(frame: Any, store: Any) -> None:
    inputs = [keras.Input((2, 2), name="first"), keras.Input((1,), name="second")]
    flat = Doubled()(keras.layers.Flatten()(inputs[0]))
    outputs = [keras.layers.Dense(1, name="one")(flat), keras.layers.Dense(1, name="two")(inputs[1])]
    fitted = regression(
        store=store,
        model=keras.Model(inputs, outputs),
        custom_objects={"Doubled": Doubled},
        loss=["mse", keras.losses.MeanAbsoluteError()],
        feature_cols=["array", "height"],
        label_cols=["height", "side"],
        callbacks=[Stopping()],
        epochs=5,
        train_steps_per_epoch=2,
    ).fit(frame)
    assert len(fitted.getHistory()["loss"]) == 2
    assert {value.mean() for value in fitted.getModel().get_weights()} == {1.0}
    types = dict(fitted.transform(frame).dtypes)
    assert (types["height__output"], types["side__output"]) == ("double", "bigint")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"model": keras.Sequential([keras.layers.Dense(1)])}, "the model has no weights yet"),
        pytest.param(
            {"feature_cols": ["height"]},
            r"the model does not accept batches of height \[32\]",
            marks=pytest.mark.nightly,  # ranks find it, as in the tests of PyTorch
        ),
        ({"feature_cols": ["array", "height"]}, "the model has 1 inputs for the 2 feature columns"),
        ({"label_cols": ["height", "side"]}, "the model has 1 outputs for the 2 label columns"),
        ({"loss": None}, "loss is missing"),
        ({"optimizer": None}, "optimizer is missing"),
        ({"train_steps_per_epoch": 10_000}, "train_steps_per_epoch is 10000, but the rows suffice for "),
        ({"model": 3}, "model is a int; expected a keras.Model"),
    ],
)
@pytest.mark.usefixtures("ranks_in_forks")
def test_bad_input_is_one_error(values: dict[str, Any], text: str, frame: Any, store: Any) -> None:
    with pytest.raises(ValueError, match=text):
        regression(store=store, **values).fit(frame)


@pytest.mark.nightly
def test_the_example_trains_and_predicts() -> None:
    assert example_accuracy("spark_keras.py") > 0.9


def test_the_module_offers_what_was_recorded() -> None:
    check_names("polyhvd.spark.keras")
