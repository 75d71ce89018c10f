"""PolyhvdTrainer in Ray Train, and in trials of Tune."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
import pytest
import ray
import ray.cloudpickle
import ray.data
import ray.train
from ray import tune
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback

from polyhvd.installed import is_installed
from polyhvd.ray.train import PolyhvdTrainer

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(config: dict[str, Any]) -> None:
    """Three steps; rank 1 is killed once in the second one, while rank 0 waits for it."""
    begin = Path(config["folder"]) / f"{ray.train.get_context().get_world_rank()}-{os.getpid()}"
    begin.with_suffix(".begun").touch()
    hvd.init()
    context = ray.train.get_context()
    same = (hvd.rank(), hvd.size()) == (context.get_world_rank(), context.get_world_size())
    weight, first = np.zeros(1), 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = json.loads((Path(folder) / "state").read_text())
        weight, first = np.array([state["weight"]]), state["step"] + 1
    folder = Path(config["folder"])
    for step in range(first, 3):
        if step == 1 and hvd.rank() == 1 and not (folder / "killed").exists():
            (folder / "killed").touch()
            ray.train.get_all_reported_checkpoints()  # returns when Ray Train has that of the first step
            os.kill(os.getpid(), signal.SIGKILL)
        weight += hvd.allreduce(np.array([config["rate"] * (hvd.rank() + 1)]), op=hvd.Sum)
        saved = folder / f"{step}-{first}-{hvd.rank()}"
        saved.mkdir(exist_ok=True)
        (saved / "state").write_text(json.dumps({"weight": weight[0], "step": step}))
        ray.train.report(
            {"weight": weight[0], "first": first, "same": same},
            checkpoint=Checkpoint(str(saved)) if hvd.rank() == 0 else None,
        )


@pytest.mark.nightly  # Ray Train takes long to start the workers again
def test_a_killed_worker_has_ray_train_start_all_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    run = RunConfig(storage_path=str(tmp_path / "results"), failure_config=FailureConfig(max_failures=1))
    result = PolyhvdTrainer(
        train,
        train_loop_config={"rate": 1.0, "folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run,
    ).fit()
    assert result.metrics == {"weight": 9.0, "first": 1, "same": True}
    begun = [path.stem.split("-") for path in tmp_path.glob("*.begun")]
    assert sorted(rank for rank, _ in begun) == ["0", "0", "1", "1"]
    assert len({process for _, process in begun}) == 4, "docs/ray.md: Ray Train keeps no process"


def read(config: dict[str, Any]) -> None:
    """Read this rank's shard, and report what all ranks have read and which GPUs they have."""
    hvd.init()
    rows = [int(row["id"]) for row in ray.train.get_dataset_shard("train").iter_rows()]
    visible = os.environ["CUDA_VISIBLE_DEVICES"].split(",")
    own = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    found = hvd.allgather_object((rows, [visible[hvd.local_rank()]] == own))
    folder = Path(config["folder"]) / f"saved-{hvd.rank()}"
    folder.mkdir()
    ray.train.report(
        {"rows": [rows for rows, _ in found], "own": [is_own for _, is_own in found]},
        checkpoint=Checkpoint(str(folder)) if hvd.rank() == 0 else None,
    )


@pytest.mark.nightly
def test_ranks_share_the_rows_of_ray_data_and_local_ranks_have_their_gpus(tmp_path: Path) -> None:
    has_limits = hasattr(ScalingConfig, "elasticity_enabled")  # not in Ray 2.51
    result = PolyhvdTrainer(
        read,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=(2, 2) if has_limits else 2, use_gpu=True),
        run_config=RunConfig(storage_path=str(tmp_path / "results")),
        datasets={"train": ray.data.range(41, override_num_blocks=8)},
    ).fit()
    assert result.metrics is not None
    assert result.metrics["own"] == [True, True]
    first, second = result.metrics["rows"]
    assert len(first) == len(second) == 20, "equally many, without the remainder"
    assert len({*first, *second}) == 40


def test_the_exception_of_a_rank_ends_the_job_with_its_words(tmp_path: Path) -> None:
    def fail() -> None:
        hvd.init()
        if hvd.rank() == 1:
            raise ValueError("a bad row")
        hvd.barrier()

    trainer = PolyhvdTrainer(
        fail,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path)),
    )
    with pytest.raises(ray.train.TrainingFailedError, match="a bad row"):
        trainer.fit()


#: Those of the suite, which tools/matrix.py names; only ranks of these tests see them.
PACKAGES = os.environ.get("SUITE_PACKAGES", "")


def fit(config: dict[str, Any]) -> None:
    """Fit a linear model in a framework; report its error from NumPy's solution."""
    sys.path.append(PACKAGES)
    hvd.init()
    x = np.random.default_rng(1).normal(size=(32, 4)).astype(np.float32)
    y = x.sum(axis=1, keepdims=True)
    expected, found = FITS[config["framework"]](x, y, config["rate"])
    for _ in range(3):
        expected = expected - config["rate"] * 2 / 32 * x.T @ (x @ expected - y)
    saved = Path(config["folder"]) / f"saved-{hvd.rank()}"
    saved.mkdir()
    errors = hvd.allgather_object(float(np.abs(found - expected).max()))
    ray.train.report({"errors": errors}, checkpoint=Checkpoint(str(saved)) if hvd.rank() == 0 else None)


def fit_keras(x: Any, y: Any, rate: float) -> tuple[Any, Any]:
    """Return the weights before three steps on the rows of all ranks, and after them."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import polyhvd.keras as hvd

    rank, size = hvd.rank(), hvd.size()
    keras.utils.set_random_seed(rank)  # other weights on each rank, until they are broadcast
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, use_bias=False)])
    model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate)), "mse")
    (first,) = hvd.broadcast_object([np.array(value) for value in model.get_weights()], root_rank=0)
    broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    model.fit(x[rank::size], y[rank::size], batch_size=32, epochs=3, verbose=0, callbacks=[broadcast])
    return first, model.get_weights()[0]


def fit_tensorflow(x: Any, y: Any, rate: float) -> tuple[Any, Any]:
    """Do the same with a gradient tape."""
    import polyhvd.tensorflow as hvd
    import tensorflow as tf

    rank, size = hvd.rank(), hvd.size()
    weights = tf.Variable(tf.random.stateless_normal((4, 1), (rank, 0)))
    hvd.broadcast_variables([weights], root_rank=0)
    first = weights.numpy().copy()
    for _ in range(3):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.constant(x[rank::size]) @ weights - y[rank::size]) ** 2)
        weights.assign_sub(rate * hvd.DistributedGradientTape(tape).gradient(loss, [weights])[0])
    return first, weights.numpy()


def fit_torch(x: Any, y: Any, rate: float) -> tuple[Any, Any]:
    """Do the same with PyTorch."""
    import polyhvd.torch as hvd
    import torch

    rank, size = hvd.rank(), hvd.size()
    torch.manual_seed(rank)
    model = torch.nn.Linear(4, 1, bias=False)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    first = model.weight.detach().numpy().T.copy()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for _ in range(3):
        optimizer.zero_grad()
        rows = torch.from_numpy(x[rank::size])
        torch.nn.functional.mse_loss(model(rows), torch.from_numpy(y[rank::size])).backward()
        optimizer.step()
    return first, model.weight.detach().numpy().T


def fit_lightning(x: Any, y: Any, rate: float) -> tuple[Any, Any]:
    """Do the same with Lightning's Trainer, which shares the rows out."""
    import lightning
    import polyhvd.lightning as hvd
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1, bias=False)

        def training_step(self, batch: Any) -> Any:
            return torch.nn.functional.mse_loss(self.linear(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=rate)

    torch.manual_seed(hvd.rank())
    module = Module()
    first = hvd.broadcast_object(module.linear.weight.detach().numpy().T.copy(), root_rank=0)
    trainer = lightning.Trainer(strategy="polyhvd", accelerator="cpu", max_epochs=3, barebones=True)
    trainer.fit(module, DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=16))
    return first, module.linear.weight.detach().numpy().T


def fit_gluon(x: Any, y: Any, rate: float) -> tuple[Any, Any]:
    """Do the same with Gluon."""
    import polyhvd.mxnet as hvd
    from mxnet import autograd, gluon, nd

    rank, size = hvd.rank(), hvd.size()
    block = gluon.nn.Dense(1, use_bias=False, in_units=4)
    block.initialize()
    block.weight.set_data(nd.full((1, 4), rank + 1))
    hvd.broadcast_parameters(block.collect_params(), root_rank=0)
    first = block.weight.data().asnumpy().T
    trainer = hvd.DistributedTrainer(block.collect_params(), "sgd", {"learning_rate": rate})
    for _ in range(3):
        with autograd.record():
            loss = ((block(nd.array(x[rank::size])) - nd.array(y[rank::size])) ** 2).mean()
        loss.backward()
        trainer.step(1)
    return first, block.weight.data().asnumpy().T


FITS = {
    "keras": fit_keras,
    "tensorflow": fit_tensorflow,
    "torch": fit_torch,
    "lightning": fit_lightning,
    "mxnet": fit_gluon,
}


@pytest.mark.nightly
@pytest.mark.parametrize("framework", FITS)
def test_a_loop_of_a_framework_trains_what_numpy_does_on_all_rows(framework: str, tmp_path: Path) -> None:
    if framework == "mxnet" and not is_installed("mxnet"):
        pytest.skip("MXNet is not installed; make nightly's ray-mxnet has it")
    if framework != "mxnet" and not Path(PACKAGES, framework).is_dir():
        pytest.skip(f"SUITE_PACKAGES names no folder with {framework}")
    result = PolyhvdTrainer(
        fit,
        train_loop_config={"rate": 0.1, "folder": str(tmp_path), "framework": framework},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path / "results")),
    ).fit()
    assert result.metrics is not None
    assert len(result.metrics["errors"]) == 2
    assert max(result.metrics["errors"]) < 1e-5


@pytest.mark.nightly
def test_trials_of_a_grid_are_jobs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its logger for TensorBoard would take the folder tests/torch for PyTorch.
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")

    def trial(config: dict[str, Any]) -> None:
        folder = tmp_path / f"trial-{config['rate']}"
        folder.mkdir()
        (folder / "killed").touch()
        PolyhvdTrainer(
            train,
            train_loop_config={"folder": str(folder), **config},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(storage_path=str(folder / "results"), callbacks=[TuneReportCallback()]),
        ).fit()

    grid = tune.Tuner(
        tune.with_resources(trial, {"CPU": 1}),
        param_space={"rate": tune.grid_search([1.0, 2.0])},
        run_config=tune.RunConfig(storage_path=str(tmp_path / "tune")),
    ).fit()
    assert grid.num_errors == 0
    assert sorted(result.metrics["weight"] for result in grid if result.metrics) == [9.0, 18.0]
