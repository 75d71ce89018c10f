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
import ray.train
from ray import tune
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.tune.integration.ray_train import TuneReportCallback

from polyhvd.ray.train import PolyhvdTrainer

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def train(config: dict[str, Any]) -> None:
    """Three steps; rank 1 is killed once in the second one, while rank 0 waits for it."""
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
def test_a_killed_worker_has_the_job_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    run = RunConfig(storage_path=str(tmp_path / "results"), failure_config=FailureConfig(max_failures=1))
    result = PolyhvdTrainer(
        train,
        train_loop_config={"rate": 1.0, "folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=run,
    ).fit()
    assert result.metrics == {"weight": 9.0, "first": 1, "same": True}


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
