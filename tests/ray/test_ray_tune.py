"""Searches of Tune whose trials are jobs of two ranks, on a real cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polyhvd.numpy as hvd
import pytest
import ray
import ray.cloudpickle
from ranks_alive import is_running, wait_until
from ray import tune
from ray.tune.schedulers import ASHAScheduler, PopulationBasedTraining

from polyhvd.ray.tune import DistributedTrainableCreator

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])

END_S = 5.0
BUSY_S = 60.0  # for what takes a second on an idle machine
STEPS = 6


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tune's logger for TensorBoard would take the folder tests/torch for PyTorch.
    monkeypatch.setenv("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Descend from 1 to 0; a checkpoint of each step has the trials that have made its steps."""
    hvd.init()
    trial = tune.get_context().get_trial_id()
    weight, makers = 1.0, []
    if (checkpoint := tune.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            weight, makers = json.loads((Path(folder) / "state").read_text())
    if folder := config.get("folder"):
        Path(folder, f"{len(makers)}-{trial}-{hvd.rank()}-{os.getpid()}").touch()
    while len(makers) < STEPS:
        time.sleep(config.get("pause_s", 0.0))
        gradient = 2 * weight * np.ones(1) * (hvd.rank() + 0.5)
        weight -= config["lr"] * float(hvd.allreduce(gradient, op=hvd.Average, name="gradient")[0])
        makers.append(trial)
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "state").write_text(json.dumps([weight, makers]))
            tune.report(
                {"loss": weight**2, "size": hvd.size(), "makers": makers},
                checkpoint=tune.Checkpoint.from_directory(folder),
            )
    return {"loss": weight**2, "size": hvd.size(), "makers": makers}


def expected(lr: float, steps: int = STEPS) -> float:
    return float((1 - 2 * lr) ** (2 * steps))


def search(tmp_path: Path, trainable: Any = None, **options: Any) -> Any:
    space = {"lr": options.pop("lr"), **options.pop("config", {})}
    run = {"storage_path": str(tmp_path / "tune"), "name": "search", **options.pop("run", {})}
    trainable = trainable or DistributedTrainableCreator(train, num_workers=2)
    config = tune.TuneConfig(metric="loss", mode="min", **options)
    return tune.Tuner(trainable, param_space=space, tune_config=config, run_config=tune.RunConfig(**run))


@pytest.mark.nightly  # ASHA's trials are those of a grid
def test_trials_of_a_grid_train_on_two_ranks_each(tmp_path: Path) -> None:
    grid = search(tmp_path, lr=tune.grid_search([0.1, 0.2])).fit()
    assert grid.num_errors == 0
    found = {result.config["lr"]: result for result in grid}
    for lr in (0.1, 0.2):
        assert found[lr].metrics["loss"] == pytest.approx(expected(lr))
        assert found[lr].metrics["size"] == 2
    assert grid.get_best_result().config["lr"] == 0.2
    assert (Path(grid.get_best_result().checkpoint.path) / "state").exists()


def test_asha_stops_a_trial_early_and_its_ranks_end(tmp_path: Path) -> None:
    started = tmp_path / "started"
    started.mkdir()
    scheduler = ASHAScheduler(max_t=STEPS, grace_period=2, reduction_factor=2)
    grid = search(
        tmp_path,
        lr=tune.grid_search([0.4, 0.01, 0.02]),
        config={"folder": str(started)},
        scheduler=scheduler,
        max_concurrent_trials=1,
    ).fit()
    assert grid.num_errors == 0
    done = {result.config["lr"]: result.metrics["training_iteration"] for result in grid}
    assert done[0.4] >= STEPS
    assert grid.get_best_result().metrics["loss"] == pytest.approx(expected(0.4))
    assert grid.get_best_result().metrics["size"] == 2
    assert [done[0.01], done[0.02]] == [2, 2]
    processes = [int(path.name.rpartition("-")[2]) for path in started.iterdir()]
    assert len(processes) == 6
    wait_until(lambda: not any(map(is_running, processes)), "the processes end", END_S)


def test_population_based_training_moves_checkpoints_between_trials(tmp_path: Path) -> None:
    scheduler = PopulationBasedTraining(
        time_attr="training_iteration",
        perturbation_interval=4,
        hyperparam_mutations={"lr": [0.001, 0.3]},
        quantile_fraction=0.5,
        synch=True,
    )
    grid = search(tmp_path, lr=tune.grid_search([0.001, 0.3]), scheduler=scheduler).fit()
    assert grid.num_errors == 0
    assert [len(result.metrics["makers"]) for result in grid] == [STEPS, STEPS]
    assert any({*result.metrics["makers"]} - {result.metrics["trial_id"]} for result in grid), "moved"
    assert max(result.metrics["loss"] for result in grid) < expected(0.001)


DRIVER = """
import sys, ray
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/../harness"]
import test_ray_tune
from ray import tune
from pathlib import Path

ray.init(address=sys.argv[1], log_to_driver=False)
test_ray_tune.search(
    Path(sys.argv[3]),
    lr=tune.grid_search([0.1, 0.2]),
    config={"folder": sys.argv[3] + "/started", "pause_s": 0.7},
    max_concurrent_trials=1,
).fit()
"""


def stops_with_a_checkpoint(driver: subprocess.Popen[bytes], storage: Path) -> bool:
    """Whether the driver is stopped now, with a whole state of the search that has the first checkpoint."""
    checkpoints = sorted(path.stat().st_mtime for path in storage.glob("*/checkpoint_*"))
    states = {path.stat().st_mtime: path for path in storage.glob("experiment_state-*.json")}
    if len(checkpoints) < 2 or max(states, default=0.0) <= checkpoints[1]:
        return False
    driver.send_signal(signal.SIGSTOP)
    time.sleep(0.1)  # for threads that are in a system call
    try:
        json.loads(states[max(states)].read_bytes())
    except ValueError:  # Ray writes it in place
        driver.send_signal(signal.SIGCONT)
        return False
    return True


def test_an_interrupted_search_goes_on_from_the_checkpoints_of_its_trials(
    cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TUNE_GLOBAL_CHECKPOINT_S", "1")  # how often it writes the state of the search
    started, storage = tmp_path / "started", tmp_path / "tune" / "search"
    started.mkdir()
    words = [sys.executable, "-c", DRIVER, cluster, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as driver:
        try:
            wait_until(lambda: stops_with_a_checkpoint(driver, storage), "a checkpoint", BUSY_S)
        finally:
            driver.send_signal(signal.SIGKILL)
    processes = [int(path.name.rpartition("-")[2]) for path in started.iterdir()]
    wait_until(lambda: not any(map(is_running, processes)), "the processes end", END_S)

    trainable = DistributedTrainableCreator(train, num_workers=2)
    grid = tune.Tuner.restore(
        str(storage), trainable, resume_unfinished=True, restart_errored=True, resume_errored=False
    ).fit()
    assert grid.num_errors == 0
    assert {result.config["lr"]: result.metrics["loss"] for result in grid} == {
        lr: pytest.approx(expected(lr)) for lr in (0.1, 0.2)
    }
    first_steps = [int(path.name.partition("-")[0]) for path in started.iterdir()]
    assert max(first_steps) >= 1, "the interrupted trial has not begun again"


class MineError(Exception):
    pass


@pytest.mark.nightly  # the trial raises what RayExecutor.run() raises
def test_the_exception_of_a_rank_is_that_of_its_trial(tmp_path: Path) -> None:
    def fail(config: dict[str, Any]) -> None:
        hvd.init()
        if hvd.rank() == 1:
            raise MineError("a bad row")
        tune.report({"loss": float(hvd.allreduce(np.ones(1), name="ones")[0])})

    grid = search(tmp_path, DistributedTrainableCreator(fail, num_workers=2), lr=0.1).fit()
    assert grid.num_errors == 1
    assert "MineError" in str(grid.errors[0])
    assert "a bad row" in str(grid.errors[0])


def test_hosts_and_slots_are_those_of_horovod() -> None:
    def placed(**options: Any) -> Any:
        return vars(DistributedTrainableCreator(train, **options))["_resources"]

    asked = placed(num_hosts=2, num_slots=3, num_cpus_per_slot=2, use_gpu=True)
    assert asked.strategy == "STRICT_SPREAD"
    assert asked.bundles == [{"CPU": 6.0, "GPU": 3.0}] * 2
    assert placed().bundles == [{"CPU": 1.0}]
    with pytest.raises(ValueError, match="expected exactly one of them"):
        DistributedTrainableCreator(train, num_workers=2, num_hosts=2)
