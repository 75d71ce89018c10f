"""Estimators of PyTorch on two executors. What all frameworks share is tested here, too."""

from __future__ import annotations

import contextlib
import copy
import datetime
import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import spark_common
import torch
from fsspec.implementations.local import LocalFileSystem
from pyarrow import parquet
from pyspark import TaskContext
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.evaluation import RegressionEvaluator
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder
from pyspark.sql import functions
from ranks_alive import is_running, wait_until
from spark_common import (
    BUSY_S,
    END_S,
    check_killed_and_resumed,
    check_names,
    elastic_fit,
    example_accuracy,
    files_in,
    parent_of,
    write_points,
)

import polyhvd.spark
from polyhvd.data import ParquetLoader, write_parquet
from polyhvd.errors import DataError
from polyhvd.spark.estimators import params
from polyhvd.spark.estimators.columns import spark_type
from polyhvd.spark.torch import TorchEstimator, TorchModel

for module in (spark_common, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)


def accuracy(outputs: Any, labels: Any) -> Any:
    return (outputs.argmax(1) == labels).float().mean()


def classifier(**values: Any) -> TorchEstimator:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    given = {
        "backend": polyhvd.spark.SparkBackend(num_proc=2),
        "model": model,
        "optimizer": torch.optim.Adam(model.parameters(), lr=0.02),
        "loss": torch.nn.CrossEntropyLoss(),
        "metrics": [accuracy],
        "feature_cols": ["vector"],
        "label_cols": ["side"],
        "batch_size": 16,
        "epochs": 4,
        "random_seed": 1,
        "verbose": 0,
    }
    return TorchEstimator(**{**given, **values})


def regression(**values: Any) -> TorchEstimator:
    torch.manual_seed(4)
    model = torch.nn.Linear(4, 1)
    given = {
        "backend": polyhvd.spark.LocalBackend(2),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.05),
        "loss": torch.nn.MSELoss(),
        "feature_cols": ["vector"],
        "label_cols": ["height"],
        "verbose": 0,
    }
    return TorchEstimator(**{**given, **values})


def values_of(model: torch.nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


def test_a_classifier_is_fitted_on_the_executors_saved_and_loaded(
    frame: Any, store: Any, tmp_path: Path
) -> None:
    fitted = classifier(store=store, validation=0.25).fit(frame)
    history = fitted.getHistory()
    assert [entry["epoch"] for entry in history] == [0, 1, 2, 3]
    assert history[-1]["train"]["loss"] < history[0]["train"]["loss"]
    assert history[-1]["validation"]["all_metrics"][0]["group_0_side"] > 0.9
    predicted = fitted.transform(frame)
    assert predicted.schema["side__output"].dataType.simpleString() == "vector"
    assert predicted.columns == [*frame.columns, "side__output"]
    rows = predicted.select("array", "side", "side__output").collect()
    outputs = np.array([row.side__output.toArray() for row in rows])
    with torch.no_grad():
        wanted = fitted.getModel()(torch.tensor([row.array for row in rows])).numpy()
    np.testing.assert_allclose(outputs, wanted, rtol=1e-5)
    assert np.mean(outputs.argmax(1) == [row.side for row in rows]) > 0.9
    run = f"runs/{fitted.getRunId()}"
    assert files_in(tmp_path / "store") == [f"{run}/checkpoint", f"{run}/logs/history.json"]
    fitted.save(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"))
    assert loaded.getHistory() == history
    assert (
        loaded.transform(frame).select("side__output").collect() == predicted.select("side__output").collect()
    )


class Recording(polyhvd.spark.LocalBackend):
    """Keeps what ranks have returned."""

    results: list[Any]

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        self.results = [copy.copy(result) for result in super().run(*args, **kwargs)]
        return self.results

    def run_elastic(self, *args: Any, **kwargs: Any) -> list[Any]:
        self.results = [copy.copy(result) for result in super().run_elastic(*args, **kwargs)]
        return self.results


def reference(folder: str, model: Any, optimizer: Any, epochs: int) -> dict[str, Any]:
    """The training of :func:`regression`, by hand."""
    import polyhvd.torch as hvd
    from polyhvd.torch.data import Batches

    hvd.init()
    for group in optimizer.param_groups:
        group["lr"] *= hvd.size()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    loader = ParquetLoader(folder, columns=["x", "y"], batch_size=8, seed=7)
    for epoch in range(epochs):
        loader.set_epoch(epoch)
        for batch in Batches(loader):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch["x"].float()), batch["y"].float()[:, None])
            (batch.weight * loss).backward()
            optimizer.step()
    hvd.shutdown()
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.usefixtures("ranks_in_forks")
def test_a_fit_on_files_equals_a_training_by_hand_and_resumes_where_it_was(store: Any) -> None:
    write_points(store)
    given = {"store": store, "feature_cols": ["x"], "label_cols": ["y"], "batch_size": 8, "random_seed": 7}
    estimator = regression(**given)
    wanted = polyhvd.run(
        reference,
        (store.get_train_data_path(), *copy.deepcopy((estimator.getModel(), estimator.getOptimizer())), 3),
        num_proc=2,
    )
    backend = Recording(2)
    whole = estimator.copy({estimator.epochs: 3, estimator.backend: backend}).fit_on_parquet()
    assert values_of(whole.getModel()) == wanted[0] == wanted[1]
    assert (backend.results[0].state, backend.results[1]) == (b"", None)  # the state is in the store
    named = estimator.setRunId("named")
    named.setEpochs(1).fit_on_parquet()
    resumed = named.setEpochs(3).fit_on_parquet()
    assert values_of(resumed.getModel()) == wanted[0]
    assert resumed.getHistory() == whole.getHistory()
    again = named.setBackend(None).setNumProc(64).fit_on_parquet()  # it is done: no rank is started
    assert values_of(again.getModel()) == wanted[0]
    with pytest.raises(ValueError, match=r"run_id 'named', with other values of batch_size: 8, not 4"):
        named.setBatchSize(4).fit_on_parquet()
    named.setBatchSize(8).setNumProc(None).setBackend(polyhvd.spark.LocalBackend(1)).setEpochs(4)
    write_parquet({"x": np.zeros((2, 4)), "y": np.zeros(2)}, f"{store.get_train_data_path()}/2.parquet")
    for epochs in (3, 4):  # all epochs are done, or one is left
        with pytest.raises(ValueError, match="checkpoint of run_id 'named', which is one of other data"):
            named.setEpochs(epochs).fit_on_parquet()
    with pytest.raises(DataError, match=r"intermediate_train_data\.7' is not a data set of Parquet"):
        named.fit_on_parquet(dataset_idx=7)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "gone",
            "feature_cols names the column 'gone', which does not exist; the columns are text, words, day",
        ),
        ("text", "'text' of type string; .*StringIndexer"),
        ("words", "'words' of type array<string>; expected numbers, arrays of numbers or vectors: cast it"),
        ("day", r"'day' of type date32\[day\]; expected numbers"),
    ],
)
def test_files_with_columns_that_cannot_be_used_are_an_error(name: str, text: str, store: Any) -> None:
    columns = {"text": ["a"], "words": [["b"]], "day": [datetime.date(2020, 1, 1)], "y": [1.0]}
    os.makedirs(store.get_train_data_path())
    parquet.write_table(pa.table(columns), f"{store.get_train_data_path()}/0.parquet")
    with pytest.raises(ValueError, match=text):
        regression(store=store, feature_cols=[name], label_cols=["y"]).fit_on_parquet()


def test_validation_files_that_cannot_be_read_are_an_error(store: Any) -> None:
    class Starting(polyhvd.spark.LocalBackend):
        def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
            raise RuntimeError(f"validation on {args[0].validation}")

    write_points(store)
    folder = store.get_val_data_path()
    estimator = regression(store=store, backend=Starting(1), feature_cols=["x"], label_cols=["y"])
    for make in (lambda: None, lambda: os.makedirs(folder)):  # a folder that is missing, and an empty one
        make()
        with pytest.raises(RuntimeError, match="validation on None"):
            estimator.fit_on_parquet()
    store.write(f"{folder}/0.parquet", b"PAR1 truncated")
    with pytest.raises(DataError, match="intermediate_val_data' is not a data set of Parquet"):
        estimator.fit_on_parquet()


def test_types_of_files_are_those_of_spark() -> None:
    lists = [pa.list_(pa.int8()), pa.large_list(pa.float32()), pa.list_(pa.list_(pa.float64(), 2), 3)]
    lists += [pa.binary(8), pa.fixed_shape_tensor(pa.float32(), [2, 2])]
    assert {spark_type(type_) for type_ in lists} == {"vector"}
    others = [pa.bool_(), pa.uint8(), pa.uint32(), pa.float16(), pa.float64(), pa.large_string()]
    wanted = ["boolean", "smallint", "bigint", "float", "double", "string"]
    assert [spark_type(type_) for type_ in others] == wanted
    assert spark_type(pa.dictionary(pa.int8(), pa.binary())) == "binary"


def test_a_fit_that_fails_names_the_run_to_resume(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(polyhvd.spark.LocalBackend):
        def run(self, fn: Any, args: Any = (), kwargs: Any = None, env: Any = None) -> list[Any]:
            store.write(store.get_checkpoint_path(args[0].run_id), b"of the first epoch")
            raise RuntimeError("a rank is lost")

    write_points(store)
    given = {"store": store, "backend": Failing(2), "feature_cols": ["x"], "label_cols": ["y"]}
    with pytest.raises(RuntimeError, match="a rank is lost"), caplog.at_level("WARNING", "polyhvd"):
        regression(**given).fit_on_parquet()
    (run_id,) = os.listdir(store.get_runs_path())
    assert f"the completed epochs are kept; resume with run_id={run_id!r}" in caplog.text


def test_a_checkpoint_that_cannot_be_looked_up_is_an_error_and_is_kept(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Replacing(polyhvd.spark.LocalBackend):
        def run(self, *args: Any, **kwargs: Any) -> list[Any]:
            store.write(checkpoint, b"of the first epoch")
            raise RuntimeError("the ranks are started")

    write_points(store)
    checkpoint = store.get_checkpoint_path("mine")
    store.write(checkpoint, b"of many epochs")
    info = LocalFileSystem.info

    def failing(self: Any, path: str, **options: Any) -> Any:
        if path == checkpoint:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return info(self, path, **options)

    monkeypatch.setattr(LocalFileSystem, "info", failing)
    given = {"store": store, "feature_cols": ["x"], "label_cols": ["y"], "run_id": "mine"}
    with pytest.raises(DataError, match=r"whether '.*mine/checkpoint' exists: OSError"):
        regression(**given, backend=Replacing(2)).fit_on_parquet()
    assert Path(checkpoint).read_bytes() == b"of many epochs"


class Elsewhere(polyhvd.spark.LocalBackend):
    """Its ranks write to a folder that this process does not see, as on a host that does not share the store.

    Args:
        store: of the fit.
    """

    def __init__(self, store: Any) -> None:
        super().__init__(1)
        self._runs = Path(store.get_runs_path())

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        results = super().run(*args, **kwargs)
        self._runs.rename(self._runs.with_name("elsewhere"))
        return results


@pytest.mark.usefixtures("ranks_in_forks")
def test_a_checkpoint_that_the_driver_does_not_find_is_an_error(store: Any) -> None:
    write_points(store)
    given = {"store": store, "backend": Elsewhere(store), "feature_cols": ["x"], "label_cols": ["y"]}
    with pytest.raises(DataError, match=r"rank 0 has written .*checkpoint', and this process finds none"):
        regression(**given).fit_on_parquet()


def test_rows_that_the_driver_does_not_find_are_an_error_before_training(frame: Any) -> None:
    memory = polyhvd.spark.Store.create("memory://mine")  # of which each process has another one
    with pytest.raises(DataError, match=r"have written rows to .*, and this process finds none there"):
        regression(store=memory).fit(frame)


def mean_label(outputs: Any, labels: Any) -> Any:
    return labels.double().mean()


def test_an_elastic_fit_outlives_two_workers_and_uses_each_row_once(frame: Any, tmp_path: Path) -> None:
    flag = tmp_path / "first"

    def killed(batches: Any) -> Any:
        yield from batches
        with contextlib.suppress(FileExistsError):
            flag.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)  # while it writes rows

    rows = frame.select("vector", "height")
    estimator = regression(metrics=[mean_label], epochs=4, batch_size=16)
    history = elastic_fit(estimator, rows.mapInArrow(killed, rows.schema), tmp_path).getHistory()
    wanted = np.mean([row.height for row in frame.select("height").collect()])
    assert [entry["epoch"] for entry in history] == [0, 1, 2, 3]
    for entry in history:
        found = entry["train"]["all_metrics"][0]["group_0_height"]
        assert found == pytest.approx(wanted, rel=1e-5), "each row has been used once"
    assert history[-1]["train"]["loss"] < 0.1 * history[0]["train"]["loss"]


class Killer:
    """A ``transformation_fn`` that kills the Python worker of its task, or what is above it, once.

    Args:
        flag: a file that it makes.
        generations: how far above.
    """

    def __init__(self, flag: Path, generations: int) -> None:
        self._flag, self._generations = flag, generations

    def __call__(self, arrays: dict[str, Any]) -> dict[str, Any]:
        assert TaskContext.get() is not None
        with contextlib.suppress(FileExistsError):
            self._flag.touch(exist_ok=False)
            victim = os.getpid()
            for _ in range(self._generations):
                victim = parent_of(victim)
            os.kill(victim, signal.SIGKILL)
        return arrays


@pytest.mark.parametrize(
    "generations", [0, pytest.param(2, marks=pytest.mark.nightly)], ids=["worker", "executor"]
)
def test_each_row_has_one_prediction_although_a_process_is_killed(
    frame: Any, tmp_path: Path, generations: int
) -> None:
    model = torch.nn.Linear(4, 1)
    names = {"feature_columns": ["array"], "label_columns": ["height"]}
    known = {"labels": {"height": "double"}, "shapes": [[1]]}  # else this process would predict a row, too
    killer = Killer(tmp_path / "flag", generations)
    fitted = TorchModel(model=model, **names, transformation_fn=killer, _metadata=known)
    rows = fitted.transform(frame).select("array", "height__output").collect()
    assert (tmp_path / "flag").exists()
    wanted = {tuple(row.array) for row in frame.select("array").collect()}
    assert len(rows) == 400
    assert {tuple(row.array) for row in rows} == wanted
    with torch.no_grad():
        outputs = model(torch.tensor([row.array for row in rows]))[:, 0].numpy()
    np.testing.assert_allclose([row.height__output for row in rows], outputs, rtol=1e-5)


class Waiting:
    """A ``transformation_fn`` that waits for a file, and makes another one first.

    Args:
        folder: in which the two are.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, arrays: dict[str, Any]) -> dict[str, Any]:
        (self._folder / "waits").touch()
        deadline = time.monotonic() + BUSY_S
        while not (self._folder / "go").exists():
            assert time.monotonic() < deadline, "not in time"
            time.sleep(0.02)
        return arrays


@pytest.mark.usefixtures("ranks_in_forks")
def test_fits_at_once_use_their_own_rows_and_need_different_run_ids(
    frame: Any, store: Any, tmp_path: Path
) -> None:
    write_parquet({"x": np.ones((2, 4))}, f"{store.get_train_data_path(1)}/0.parquet")  # of other fits
    given = {"store": store, "metrics": [mean_label], "backend": polyhvd.spark.LocalBackend(1)}
    first = regression(**given, run_id="one", transformation_fn=Waiting(tmp_path))
    job = ThreadPoolExecutor(1).submit(first.fit, frame)
    wait_until(lambda: (tmp_path / "waits").exists() or job.done(), "the first fit waits", BUSY_S)
    try:
        with pytest.raises(ValueError, match="another fit with run_id 'one' is running"):
            regression(**given, run_id="one").fit(frame)
        part = frame.where("height > 0")
        second = regression(**given, run_id="1").fit(part)
    finally:
        (tmp_path / "go").touch()
    for fitted, rows in ((job.result(BUSY_S), frame), (second, part)):
        found = fitted.getHistory()[0]["train"]["all_metrics"][0]["group_0_height"]
        heights = [row.height for row in rows.select("height").collect()]
        assert found == pytest.approx(np.mean(heights), rel=1e-5)
    names = [name for run in ("1", "one") for name in (f"{run}/checkpoint", f"{run}/logs/history.json")]
    files = ["intermediate_train_data.1/0.parquet", *(f"runs/{name}" for name in names)]
    assert files_in(tmp_path / "store") == files


@pytest.mark.nightly
def test_a_cancelled_job_group_while_rows_are_written_leaves_no_rows(
    session: Any, frame: Any, store: Any, tmp_path: Path
) -> None:
    def slowly(batches: Any) -> Any:
        yield from [next(batches)] * 100  # more than the workers' buffers
        time.sleep(600)

    def call() -> None:
        session.sparkContext.setJobGroup("mine", "", interruptOnCancel=True)
        rows = frame.select("array", "height")
        regression(store=store, feature_cols=["array"]).fit(rows.mapInArrow(slowly, rows.schema))

    job = ThreadPoolExecutor(1).submit(call)
    wait_until(lambda: bool(files_in(tmp_path)) or job.done(), "rows are written", BUSY_S)
    session.sparkContext.cancelJobGroup("mine")
    assert "cancelled" in str(job.exception(BUSY_S))
    time.sleep(END_S)  # in which Spark kills its Python workers
    assert files_in(tmp_path) == []


@pytest.mark.nightly
def test_a_cancelled_job_group_ends_the_fit_and_its_ranks(
    session: Any, frame: Any, store: Any, tmp_path: Path
) -> None:
    given = {"store": store, "run_id": "mine", "backend": polyhvd.spark.SparkBackend(num_proc=2)}
    (tmp_path / "started").mkdir()
    slow = regression(**given, transformation_fn=spark_common.Slow(tmp_path / "started"), epochs=50)

    def call() -> None:
        session.sparkContext.setJobGroup("mine", "", interruptOnCancel=True)
        slow.fit(frame)

    job = ThreadPoolExecutor(1).submit(call)
    checkpoint = Path(store.get_checkpoint_path("mine"))
    wait_until(lambda: checkpoint.exists() or job.done(), "a checkpoint is written", BUSY_S)
    session.sparkContext.cancelJobGroup("mine")
    error = job.exception(BUSY_S)
    assert isinstance(error, RuntimeError)
    assert "cancelled" in str(error)
    ranks = spark_common.started(tmp_path / "started")
    assert len(ranks) == 2
    wait_until(lambda: not any(map(is_running, ranks)), "the processes end", END_S)
    assert files_in(tmp_path / "store") == ["runs/mine/checkpoint", "runs/mine/logs/history.json"]
    assert len(regression(**given, epochs=60).fit(frame).getHistory()) == 60


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_a_killed_rank_is_one_error_and_the_next_fit_resumes(store: Any, tmp_path: Path) -> None:
    check_killed_and_resumed(regression, lambda model: values_of(model.getModel()), store, tmp_path)


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_an_interrupted_fit_resumes_and_refuses_other_data(frame: Any, store: Any, tmp_path: Path) -> None:
    flag = tmp_path / "broken"

    def loss_of(output: Any, label: Any) -> Any:
        if flag.exists():
            raise ArithmeticError("of the loss")
        return torch.nn.functional.mse_loss(output, label)

    given = {"store": store, "run_id": "mine", "random_seed": 2, "loss": loss_of, "epochs": 1}
    regression(**given).fit(frame)
    flag.touch()
    with pytest.raises(ArithmeticError, match="of the loss"):
        regression(**{**given, "epochs": 3}).fit(frame)
    flag.unlink()
    assert files_in(tmp_path / "store") == ["runs/mine/checkpoint", "runs/mine/logs/history.json"]
    resumed = regression(**{**given, "epochs": 3}).fit(frame)
    whole = regression(**{**given, "epochs": 3, "run_id": None}).fit(frame)
    assert values_of(resumed.getModel()) == values_of(whole.getModel())
    with pytest.raises(ValueError, match="checkpoint of run_id 'mine', which is one of other data"):
        regression(**{**given, "epochs": 4}).fit(frame.limit(300))
    again = regression(**{**given, "epochs": 4}).fit(frame.repartition(5, "a"))
    assert [entry["epoch"] for entry in again.getHistory()] == [0, 1, 2, 3]


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_columns_of_several_types_labels_and_weights_are_used(frame: Any, store: Any) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 1), torch.nn.Linear(1, 1)

        def forward(self, array: Any, number: Any, whole: Any) -> Any:
            assert (array.dtype, whole.dtype) == (torch.float32, torch.int64)
            return self.first(array), self.second(number) + whole

    model = Two()
    estimator = regression(
        store=store,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        feature_cols=["array", "a", "side"],
        categorical_cols=["side"],
        input_shapes=[[-1, 4], [-1, 1], [-1, 1]],
        label_cols=["height", "side"],
        loss_weights=[1.0, 0.5],
        metrics=[[torch.nn.functional.l1_loss]],
        sample_weight_col="d",
        validation="held",
        epochs=1,
    )
    fitted = estimator.fit(frame.withColumn("d", functions.lit(0.0)))
    assert values_of(fitted.getModel()) == values_of(model)  # no row has a weight
    metrics = fitted.getHistory()[0]["validation"]["all_metrics"][0]
    held = frame.where("held").select("array", "height").collect()
    with torch.no_grad():
        outputs = model.first(torch.tensor([row.array for row in held]))[:, 0].numpy()
    assert metrics["group_0_height"] == pytest.approx(
        np.abs(outputs - [row.height for row in held]).mean(), rel=1e-4
    )
    types = dict(fitted.setOutputCols(["one", "two"]).transform(frame).dtypes)
    assert (types["one"], types["two"]) == ("double", "bigint")


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_images_are_decoded_by_the_transformation(session: Any, store: Any) -> None:
    def decode(arrays: dict[str, Any]) -> dict[str, Any]:
        pixels = [np.frombuffer(data, np.uint8) for data in arrays["image"]]
        return {**arrays, "image": np.stack(pixels).astype(np.float32) / 255}

    images = np.random.default_rng(2).integers(0, 255, (64, 4), dtype=np.uint8)
    rows = [(image.tobytes(), float(image.sum())) for image in images]
    frame = session.createDataFrame(rows, "image binary, total double")
    given = {"store": store, "feature_cols": ["image"], "label_cols": ["total"]}
    fitted = regression(**given, transformation_fn=decode).fit(frame)
    rows = fitted.transform(frame.select("image")).collect()
    with torch.no_grad():
        wanted = fitted.getModel()(torch.tensor(images / np.float32(255)))[:, 0].tolist()
    assert [row.total__output for row in rows] == pytest.approx(wanted, rel=1e-5)
    with pytest.raises(ValueError, match=r"'image' of type binary; .*transformation_fn that decodes it"):
        regression(**given).fit(frame)


@pytest.mark.usefixtures("ranks_in_forks")
def test_a_pipeline_is_fitted_saved_and_loaded(frame: Any, store: Any, tmp_path: Path) -> None:
    assembler = VectorAssembler(inputCols=["a", "b", "c", "d"], outputCol="assembled")
    given = {"store": store, "backend": polyhvd.spark.LocalBackend(1), "feature_cols": ["assembled"]}
    pipeline = Pipeline(stages=[assembler, regression(**given)])
    fitted = pipeline.fit(frame)
    fitted.save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    wanted = fitted.transform(frame).select("height__output").collect()
    assert loaded.transform(frame).select("height__output").collect() == wanted
    pipeline.save(str(tmp_path / "pipeline"))
    estimator = Pipeline.load(str(tmp_path / "pipeline")).getStages()[1]
    assert estimator.setStore(store).getFeatureCols() == ["assembled"]
    assert estimator.fit(assembler.transform(frame)).getHistory()[0]["train"]["loss"] > 0


@pytest.mark.nightly
def test_cross_validation_finds_the_better_number_of_epochs(frame: Any, store: Any) -> None:
    estimator = regression(store=store, num_proc=1, backend=None)
    grid = ParamGridBuilder().addGrid(estimator.epochs, [1, 6]).build()
    evaluator = RegressionEvaluator(predictionCol="height__output", labelCol="height")
    validator = CrossValidator(
        estimator=estimator, estimatorParamMaps=grid, evaluator=evaluator, numFolds=2, parallelism=2, seed=1
    )
    fitted = validator.fit(frame)
    assert len(fitted.bestModel.getHistory()) == 6
    assert fitted.avgMetrics[1] < fitted.avgMetrics[0]


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_a_step_of_ones_own_and_a_constructed_loss_are_called(frame: Any, store: Any) -> None:
    def step(*arguments: Any) -> Any:
        model, optimizer, transform_outputs, loss_fn, inputs, labels, weights = arguments
        outputs, labels = transform_outputs(model(*inputs), labels)
        loss = 0.0 * loss_fn(outputs, labels, weights)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return outputs, loss

    given = {"loss": None, "loss_constructors": [lambda: torch.nn.MSELoss()], "train_minibatch_fn": step}
    estimator = regression(store=store, train_steps_per_epoch=40, validation=0.2, **given)
    fitted = estimator.setValidationStepsPerEpoch(1).fit(frame)
    assert values_of(fitted.getModel()) == values_of(estimator.getModel())
    assert fitted.getHistory()[0]["train"]["loss"] == 0


def bad_metric(outputs: Any, labels: Any) -> Any:
    raise LookupError("of the metric")


BAD: dict[str, tuple[dict[str, Any], Callable[[Any], Any], type[Exception], str]] = {
    "a missing column": (
        {"feature_cols": ["gone"]},
        lambda df: df,
        ValueError,
        "feature_cols names the column 'gone'",
    ),
    "strings": (
        {"feature_cols": ["text"]},
        lambda df: df.withColumn("text", functions.lit("x")),
        ValueError,
        "'text' of type string; .*StringIndexer",
    ),
    "dates": (
        {"label_cols": ["day"]},
        lambda df: df.withColumn("day", functions.current_date()),
        ValueError,
        "label_cols names the column 'day' of type date",
    ),
    "nulls": (
        {"feature_cols": ["a"]},
        lambda df: df.withColumn("a", functions.when(df.a > 0, df.a)),
        ValueError,
        "column 'a' has nulls",
    ),
    "arrays of different lengths": (
        {"feature_cols": ["array"]},
        lambda df: df.withColumn("array", functions.slice("array", 1, functions.col("side").cast("int") + 1)),
        ValueError,
        "column 'array' has arrays of different lengths",
    ),
    "no rows": ({}, lambda df: df.where("a > 1e9"), ValueError, "no row for training: it is empty"),
    "no rows for validation": (
        {"validation": "held"},
        lambda df: df.withColumn("held", functions.lit(0)),
        ValueError,
        "validation='held' selects none of the 400 rows",
    ),
    "one row": ({}, lambda df: df.limit(1), ValueError, "has 1 row, fewer than the 2 ranks"),
    "another model": (
        {"feature_cols": ["a"]},
        lambda df: df,
        ValueError,
        r"the model does not accept batches of a \[32\]",
    ),
    "a metric that raises": ({"metrics": [bad_metric]}, lambda df: df, LookupError, "of the metric"),
    "a missing loss": ({"loss": None}, lambda df: df, ValueError, "loss is missing"),
    "outputs without labels": (
        {"label_cols": ["height", "a"]},
        lambda df: df,
        ValueError,
        "the model has 1 outputs for the 2 label columns height, a",
    ),
    "another optimizer": (
        {"optimizer": torch.optim.SGD([torch.zeros(3, requires_grad=True)], lr=0.1)},
        lambda df: df,
        ValueError,
        "the optimizer has 1 parameters that are not the model's, which has 2",
    ),
    "no ranks": ({"num_proc": 0, "backend": None}, lambda df: df, ValueError, "num_proc is 0"),
    "several weights for a row": (
        {"sample_weight_col": "array"},
        lambda df: df,
        ValueError,
        "sample_weight_col names the column 'array' of type array<double>; expected numbers: cast it",
    ),
    "a part above 1": ({"validation": 1.5}, lambda df: df, ValueError, "validation is 1.5"),
    "a run outside of the store": (
        {"run_id": "../mine"},
        lambda df: df,
        ValueError,
        r"run_id is '../mine'; expected the name of a folder, without \* / \? \[ ",
    ),
}


#: Those that reach the ranks, or Spark's tasks, by different paths; the others are variants.
USUAL = (
    *("nulls", "strings", "one row", "another model", "a metric that raises", "a missing loss"),
    "a run outside of the store",
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in USUAL else pytest.mark.nightly) for case in BAD]
)
@pytest.mark.usefixtures("ranks_in_forks")
def test_bad_input_is_one_error_and_leaves_nothing(case: str, frame: Any, store: Any, tmp_path: Path) -> None:
    values, change, kind, text = BAD[case]
    with pytest.raises(kind, match=text):
        regression(store=store, **values).fit(change(frame))
    assert files_in(tmp_path) == []


class Own(polyhvd.spark.Backend):
    """A backend without elastic jobs."""

    def run(self, *args: Any, **kwargs: Any) -> list[Any]:
        raise AssertionError("ranks are started")

    def num_processes(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("backend", "values", "error", "text"),
    [
        (
            polyhvd.spark.SparkBackend(2, elastic_timeout=1),
            {},
            TypeError,
            r"polyhvd\.spark\.run\(\): got an unexpected keyword argument 'elastic_timeout'",
        ),
        (
            polyhvd.spark.SparkBackend(2, executable="python"),
            {"elastic": True},
            TypeError,
            r"polyhvd\.spark\.run_elastic\(\): got an unexpected keyword argument 'executable'",
        ),
        (polyhvd.spark.SparkBackend(2), {"min_num_proc": 3}, ValueError, "min_num_proc"),
        (polyhvd.spark.SparkBackend(2), {"max_num_proc": 1}, ValueError, "max_num_proc"),
        (Own(), {"elastic": True}, ValueError, "Own has no elastic jobs"),
        (polyhvd.spark.SparkBackend(2), {}, RuntimeError, r"spark\.dynamicAllocation\.enabled is true"),
    ],
    ids=["option", "option-elastic", "minimum", "maximum", "no-elastic", "dynamic"],
)
def test_what_the_backend_refuses_is_an_error_before_rows_are_written(
    backend: Any,
    values: dict[str, Any],
    error: type[Exception],
    text: str,
    frame: Any,
    store: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def write(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("rows are written")

    monkeypatch.setattr("polyhvd.spark.estimators.estimator.write", write)
    if error is RuntimeError:
        monkeypatch.setattr("polyhvd.spark.cluster.ClassicCluster.is_dynamic", lambda self: True)
    with pytest.raises(error, match=text):
        regression(store=store, backend=backend, **values).fit(frame)


def test_a_backend_with_a_run_method_of_the_user_is_not_checked_as_spark_s() -> None:
    class Mine(polyhvd.spark.SparkBackend):
        def run(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    Mine(2, elastic_timeout=1).require_usable(is_elastic=False)
    with pytest.raises(TypeError, match="executable"):
        Mine(2, executable="python").require_usable(is_elastic=True)


def test_parameters_are_checked_when_they_are_set() -> None:
    with pytest.raises(TypeError, match="TorchEstimator has no parameter 'epoch'; expected some of num_proc"):
        TorchEstimator(epoch=3)
    with pytest.raises(TypeError, match="epochs"):
        TorchEstimator(epochs="three")
    with pytest.raises(ValueError, match="num_proc or backend, not both"):
        regression(store=polyhvd.spark.Store.create("memory://x"), num_proc=2).fit(None)


def test_a_full_store_is_an_error(frame: Any, full: Path) -> None:
    store = polyhvd.spark.Store.create(str(full))
    with pytest.raises(DataError, match=r"rows cannot be written to .*No space left"):
        regression(store=store).fit(frame)


@pytest.fixture
def locked(tmp_path: Path) -> Path:
    """A file in place of a folder: a folder without permissions would not stop root."""
    path = tmp_path / "locked"
    path.write_text("no folder")
    return path


@pytest.mark.nightly
def test_a_store_that_cannot_be_written_is_an_error(frame: Any, locked: Path) -> None:
    with pytest.raises(DataError, match="rows cannot be written to"):
        regression(store=polyhvd.spark.Store.create(str(locked / "store"))).fit(frame)


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_checkpoints_that_cannot_be_written_are_an_error(frame: Any, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("no folder")
    store = polyhvd.spark.Store.create(str(tmp_path / "store"), runs_path=str(tmp_path / "runs"))
    with pytest.raises(DataError, match=r"checkpoint' cannot be written"):
        regression(store=store).fit(frame)
    assert files_in(tmp_path) == ["runs"]


class Large(torch.nn.Linear):
    """A layer with a checkpoint of 40 KB."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("rest", torch.zeros(10_000))


@pytest.mark.usefixtures("ranks_in_forks")
def test_a_model_that_is_too_large_for_a_message_goes_through_the_store(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_points(store)
    files, limit = files_in(tmp_path), 30_000
    monkeypatch.setattr("polyhvd.launch.job.function.VALUE_BYTES_MAX", limit)
    monkeypatch.setattr("polyhvd.spark.estimators.estimator._SENT_BYTES_MAX", limit)
    model = Large()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05), "epochs": 2}
    given |= {"store": store, "feature_cols": ["x"], "label_cols": ["y"], "run_id": "mine"}
    history = regression(**given).fit_on_parquet().getHistory()
    assert history[1]["train"]["loss"] < history[0]["train"]["loss"]
    run = "store/runs/mine"
    assert files_in(tmp_path) == [*files, f"{run}/checkpoint", f"{run}/logs/history.json"]
    backend = Recording(2)
    elastic = regression(**{**given, "run_id": "elastic"}, backend=backend, elastic=True).fit_on_parquet()
    assert [entry["epoch"] for entry in elastic.getHistory()] == [0, 1]
    assert backend.results[0].state == b"", "it is in the store"


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_a_disk_that_fills_up_keeps_the_last_checkpoint(store: Any, full: Path, tmp_path: Path) -> None:
    write_points(store)
    (full / "filling").unlink()
    model = Large()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.05), "epochs": 3}
    given |= {"feature_cols": ["x"], "label_cols": ["y"], "run_id": "mine"}

    def fit(runs: Path) -> Any:
        place = polyhvd.spark.Store.create(str(tmp_path / "store"), runs_path=str(runs))
        return regression(**given, store=place, backend=polyhvd.spark.LocalBackend(1)).fit_on_parquet()

    with pytest.raises(DataError, match=r"checkpoint' cannot be written: .*No space left"):
        fit(full)  # there is room for one, and for a second to be replaced there is not
    assert files_in(full) == ["mine/checkpoint", "mine/logs/history.json"]
    shutil.copytree(full, tmp_path / "runs")
    resumed = fit(tmp_path / "runs")
    assert [entry["epoch"] for entry in resumed.getHistory()] == [0, 1, 2]


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_nulls_and_taken_names_are_errors_of_transform(frame: Any, store: Any) -> None:
    fitted = regression(store=store).fit(frame)
    holes = frame.withColumn("vector", functions.when(frame.a > 0, frame.vector))
    with pytest.raises(Exception, match=r"transform\(\): column 'vector' has nulls"):
        fitted.transform(holes).collect()
    with pytest.raises(ValueError, match="has a column 'side' already; call setOutputCols"):
        fitted.setOutputCols(["side"]).transform(frame)
    with pytest.raises(
        ValueError, match="outputCols are one, two; expected a name for each of the label col"
    ):
        fitted.setOutputCols(["one", "two"]).transform(frame)
    by_hand = TorchModel(model=fitted.getModel(), feature_columns=["array"], label_columns=["height"])
    wanted = [
        row.height__output for row in fitted.setOutputCols(["height__output"]).transform(frame).collect()
    ]
    assert [row.height__output for row in by_hand.transform(frame).collect()] == wanted


def constant_model(value: float, kind: str) -> TorchModel:
    """A model that predicts a number for each row, for a label of a type of Spark."""
    model = torch.nn.Linear(4, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.constant_(model.bias, value)
    known = {"labels": {"y": kind}, "shapes": [[1]]}
    return TorchModel(model=model, feature_columns=["array"], label_columns=["y"], _metadata=known)


def test_columns_of_the_same_name_stay_and_nulls_in_arrays_are_an_error_of_transform(frame: Any) -> None:
    twice = frame.select("array", "a", functions.col("b").alias("a"))
    found = constant_model(2.6, "tinyint").transform(twice)
    assert found.columns == ["array", "a", "a", "y__output"]
    assert {row.y__output for row in found.collect()} == {3}
    holes = functions.array(*map(functions.lit, (1.0, None, 1.0, 1.0)))
    with pytest.raises(Exception, match=r"transform\(\): column 'array' has nulls"):
        constant_model(1.0, "double").transform(frame.select(holes.alias("array"))).collect()


def test_every_parameter_is_documented() -> None:
    pages = [folder / "docs" / "spark.md" for folder in Path(__file__).resolve().parents]
    page = next(page for page in pages if page.exists())  # make matrix copies the tests below the checkout
    assert params.describe() in page.read_text()


@pytest.mark.nightly  # it calls the same as the tests of a classifier and of a pipeline
def test_the_example_trains_and_predicts() -> None:
    assert example_accuracy("spark_torch.py") > 0.9


def test_the_module_offers_what_was_recorded() -> None:
    check_names("polyhvd.spark.torch")
