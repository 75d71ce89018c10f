"""Estimators of Lightning on two executors: what differs from those of PyTorch."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import lightning
import numpy as np
import pytest
import spark_common
import torch
from pyspark.ml import Pipeline, PipelineModel
from spark_common import (
    check_ended_by_a_callback,
    check_killed_and_resumed,
    check_names,
    columns,
    elastic_fit,
    example_accuracy,
    write_points,
)

import polyhvd.spark
from polyhvd.data import ParquetLoader, write_parquet
from polyhvd.spark.lightning import LightningEstimator, TorchEstimator

for module in (spark_common, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))

    def forward(self, array: Any) -> Any:
        return self.layers(array)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.cross_entropy(self(batch["array"]), batch["side"])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_accuracy", (self(batch["array"]).argmax(1) == batch["side"]).float().mean())

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.03)


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.mse_loss(self(batch["x"]), batch["y"][:, None])
        self.log("loss", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def regression(**values: Any) -> LightningEstimator:
    torch.manual_seed(4)
    given = {
        "backend": polyhvd.spark.LocalBackend(2),
        "model": Regression(),
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "random_seed": 7,
        "verbose": 0,
    }
    return LightningEstimator(**{**given, **values})


def values_of(model: torch.nn.Module) -> dict[str, Any]:
    return {name: value.tolist() for name, value in model.state_dict().items()}


def test_a_classifier_is_fitted_on_the_executors_saved_and_loaded(
    frame: Any, store: Any, tmp_path: Path
) -> None:
    estimator = TorchEstimator(
        backend=polyhvd.spark.SparkBackend(num_proc=2),
        store=store,
        model=Classifier(),
        feature_cols=["array"],
        label_cols=["side"],
        validation="held",
        batch_size=16,
        epochs=4,
        verbose=0,
        random_seed=1,
        callbacks=[lightning.pytorch.callbacks.LearningRateMonitor()],
        checkpoint_callback=lightning.pytorch.callbacks.ModelCheckpoint(filename="best", monitor="loss"),
        logger=True,
    )
    pipeline = Pipeline(stages=[estimator]).fit(frame)
    fitted = pipeline.stages[0]
    history = fitted.getHistory()
    assert [entry["epoch"] for entry in history] == [0, 1, 2, 3]
    assert history[-1]["loss"] < history[0]["loss"]
    assert history[-1]["val_accuracy"] > 0.9
    rows = pipeline.transform(frame).select("array", "side", "side__output").collect()
    outputs = np.array([row.side__output.toArray() for row in rows])
    with torch.no_grad():
        wanted = fitted.getModel()(torch.tensor([row.array for row in rows])).numpy()
    np.testing.assert_allclose(outputs, wanted, rtol=1e-5)
    pipeline.save(str(tmp_path / "model"))
    loaded = PipelineModel.load(str(tmp_path / "model"))
    assert loaded.stages[0].getHistory() == history
    assert loaded.transform(frame).select("array", "side", "side__output").collect() == rows
    estimator.save(str(tmp_path / "estimator"))
    again = LightningEstimator.load(str(tmp_path / "estimator"))
    assert values_of(again.getModel()) == values_of(estimator.getModel())
    logs = tmp_path / "store" / "runs" / fitted.getRunId() / "logs"
    assert {path.name for path in logs.rglob("*")} >= {"history.json", "best.ckpt", "metrics.csv"}


def reference(folder: str, module: Any, epochs: int) -> dict[str, Any]:
    """The training of :func:`regression`, by hand."""
    import polyhvd.lightning as hvd
    from polyhvd.torch.data import Batches

    hvd.init()
    loader = ParquetLoader(folder, columns=["x", "y"], batch_size=8, seed=7, transform=columns)
    lightning.seed_everything(7, verbose=False)
    weights: list[float] = []

    class Strategy(hvd.PolyhvdStrategy):
        def backward(self, closure_loss: Any, *args: Any, **kwargs: Any) -> Any:
            return super().backward(weights[-1] * closure_loss, *args, **kwargs)

    class Data:
        def __len__(self) -> int:
            return int(loader.steps_per_epoch)

        def __iter__(self) -> Any:
            loader.set_epoch(trainer.current_epoch)
            for batch in Batches(loader):
                weights.append(batch.weight)
                yield batch.arrays

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu", strategy=Strategy(), max_epochs=epochs, use_distributed_sampler=False, **quiet
    )
    trainer.fit(module, Data())
    hvd.shutdown()
    return values_of(module)


@pytest.mark.usefixtures("ranks_in_forks")
def test_a_fit_on_files_equals_a_training_by_hand_and_resumes_where_it_was(store: Any) -> None:
    write_points(store)
    estimator = regression(store=store)
    folder = store.get_train_data_path()
    wanted = polyhvd.run(reference, (folder, copy.deepcopy(estimator.getModel()), 3), num_proc=2)
    named = estimator.setRunId("named")
    first = named.setEpochs(1).fit_on_parquet()
    resumed = named.setEpochs(3).fit_on_parquet()
    assert values_of(resumed.getModel()) == wanted[0] == wanted[1]
    history = resumed.getHistory()
    assert history[:1] == first.getHistory()
    assert [entry["epoch"] for entry in history] == [0, 1, 2]
    with pytest.raises(ValueError, match=r"with other values of trainer_args: {}, not {'max_time': None}"):
        named.setTrainerArgs({"max_time": None}).fit_on_parquet()


class Plateau(Regression):
    """A module whose learning rate follows a metric of which the ranks have different values."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_y", batch["y"].mean() * (1 + self.trainer.current_epoch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_y"}}


class Noting(lightning.pytorch.callbacks.Callback):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        found = trainer.optimizers[0].param_groups[0]["lr"], values_of(pl_module)
        (self._folder / f"rank-{polyhvd.rank()}").write_text(repr(found))


@pytest.mark.usefixtures("ranks_in_forks")
def test_a_schedule_follows_the_mean_over_the_rows_of_all_ranks(store: Any, tmp_path: Path) -> None:
    write_points(store)
    heights = np.array([1.0, 2.0, -3.0, -4.0, 9.0])  # two for each rank, and one for the first
    write_parquet({"x": np.ones((5, 4)), "y": heights}, f"{store.get_val_data_path()}/0.parquet")
    given = {"model": Plateau(), "epochs": 3, "val_batch_size": 2, "callbacks": [Noting(tmp_path)]}
    history = regression(store=store, **given).fit_on_parquet().getHistory()
    assert [entry["val_y"] for entry in history] == pytest.approx([1.0, 2.0, 3.0])
    first, second = ((tmp_path / f"rank-{rank}").read_text() for rank in (0, 1))
    assert first == second


class Late(Regression):
    """A module that logs a metric at the end of each epoch."""

    def on_train_epoch_end(self) -> None:
        self.log("late", float(self.current_epoch))


@pytest.mark.usefixtures("ranks_in_forks")
def test_the_history_has_the_metrics_that_the_module_logs_at_the_end_of_an_epoch(store: Any) -> None:
    write_points(store)
    history = regression(store=store, model=Late(), epochs=3).fit_on_parquet().getHistory()
    assert [entry["late"] for entry in history] == [0.0, 1.0, 2.0]


class Uneven(Regression):
    """A module that logs a metric on each rank that the other rank does not log."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_rank == 0:
            self.log("first", 3.0, rank_zero_only=True, on_step=False, on_epoch=True)
        else:
            self.log("second", 5.0 + self.current_epoch)
        return super().training_step(batch, batch_idx)


@pytest.mark.usefixtures("ranks_in_forks")
def test_metrics_that_only_some_ranks_log_are_in_the_history(store: Any) -> None:
    write_points(store)
    history = regression(store=store, model=Uneven(), epochs=2).fit_on_parquet().getHistory()
    assert [(entry["first"], entry["second"]) for entry in history] == [(3.0, 5.0), (3.0, 6.0)]


@pytest.mark.usefixtures("ranks_in_forks")
def test_a_resumed_fit_stops_as_early_as_one_that_was_not_interrupted(store: Any) -> None:
    write_points(store)
    stopping = lightning.pytorch.callbacks.EarlyStopping("loss", patience=3, min_delta=1e9)
    estimator = regression(store=store, callbacks=[stopping], run_id="mine")
    estimator.setEpochs(2).fit_on_parquet()
    resumed = estimator.setEpochs(9).fit_on_parquet()
    assert [entry["epoch"] for entry in resumed.getHistory()] == [0, 1, 2, 3]


class Filling(lightning.pytorch.callbacks.Callback):
    """Changes the weights at the end of training, as averaging of weights does."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        for parameter in pl_module.parameters():
            parameter.data.fill_(7.0)


@pytest.mark.usefixtures("ranks_in_forks")
@pytest.mark.parametrize("elastic", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_the_model_has_the_weights_of_the_end_of_training_and_a_further_fit_has_others(
    elastic: bool, store: Any
) -> None:
    write_points(store)
    given = {"store": store, "elastic": elastic}
    estimator = regression(**given, callbacks=[Filling()], run_id="mine", epochs=2)
    fitted = estimator.fit_on_parquet()
    assert all((value == 7.0).all() for value in fitted.getModel().state_dict().values())
    assert values_of(estimator.fit_on_parquet().getModel()) == values_of(fitted.getModel())
    further = regression(**given, run_id="mine", epochs=3).fit_on_parquet()
    whole = regression(**given, run_id="whole", epochs=3).fit_on_parquet()
    assert values_of(further.getModel()) == values_of(whole.getModel())


@pytest.mark.nightly
def test_an_elastic_fit_outlives_a_worker(frame: Any, tmp_path: Path) -> None:
    estimator = regression(model=Regression(), epochs=4, batch_size=16)
    changed = frame.selectExpr("array AS x", "height AS y")
    history = elastic_fit(estimator, changed, tmp_path).getHistory()
    assert [entry["epoch"] for entry in history] == [0, 1, 2, 3]
    assert history[-1]["loss"] < 0.1 * history[0]["loss"]


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_a_killed_rank_is_one_error_and_the_next_fit_resumes(store: Any, tmp_path: Path) -> None:
    check_killed_and_resumed(regression, lambda model: values_of(model.getModel()), store, tmp_path)


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_a_fit_that_early_stopping_has_ended_is_completed(store: Any) -> None:
    stopping = lightning.pytorch.callbacks.EarlyStopping("loss", patience=1, min_delta=1e9)
    further = check_ended_by_a_callback(regression, store, stopping)
    assert [entry["epoch"] for entry in further.getHistory()] == [0, 1, 2, 3, 4]


class Plain(torch.nn.Module):
    pass


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"model": Plain()}, "model is a Plain; use polyhvd.spark.torch.TorchEstimator"),
        ({"trainer_args": {"max_epochs": 3}}, "trainer_args has 'max_epochs', which epochs sets"),
        ({"trainer_args": {"epoch": 3}}, "trainer_args has 'epoch', not an argument of a Trainer"),
        ({"input_shapes": [[-1, 4], [-1, 4]]}, "there are 2 values for the columns x"),
    ],
)
def test_bad_values_are_an_error_before_rows_are_read(values: dict[str, Any], text: str, store: Any) -> None:
    with pytest.raises(ValueError, match=text):
        regression(store=store, **values).fit(None)


class Diverging(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * float("nan")


class Files(lightning.LightningDataModule):
    def __init__(self, train_dir: str, train_batch_size: int, cur_shard: int, shard_count: int) -> None:
        super().__init__()
        given = {"batch_size": train_batch_size, "seed": 7, "transform": columns}
        self.loader = ParquetLoader(train_dir, columns=["x", "y"], **given)
        assert (cur_shard, shard_count) == (polyhvd.rank(), polyhvd.size())

    def train_dataloader(self) -> Any:
        from polyhvd.torch.data import Batches

        batches = [batch.arrays for batch in Batches(self.loader)]
        return torch.utils.data.DataLoader(batches, batch_size=None)


@pytest.mark.nightly
@pytest.mark.usefixtures("ranks_in_forks")
def test_a_loss_that_is_not_finite_and_an_own_data_module_are_used(store: Any) -> None:
    write_points(store)
    with pytest.raises(ValueError, match="the loss is nan, and terminate_on_nan is set"):
        regression(store=store, model=Diverging(), terminate_on_nan=True).fit_on_parquet()
    fitted = regression(store=store, data_module=Files).fit_on_parquet()
    wanted = regression(store=store).fit_on_parquet()  # the last batches of the ranks differ in their rows
    for name, value in fitted.getModel().state_dict().items():
        torch.testing.assert_close(value, wanted.getModel().state_dict()[name])
    history = regression(store=store, data_module=Files, epochs=2).fit_on_parquet().getHistory()
    assert history[1]["loss"] < history[0]["loss"]


@pytest.mark.nightly
def test_the_example_trains_and_predicts() -> None:
    assert example_accuracy("spark_lightning.py") > 0.9


def test_the_module_offers_what_was_recorded() -> None:
    check_names("polyhvd.spark.lightning")
