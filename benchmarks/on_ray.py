"""Jobs on Ray beside those of Ray Train and polyhvdrun: ``python -m benchmarks --only ray``.

The environment of Ray that ``make bench-peers`` installs measures, in one cluster. Starts and steps take
turns. Jobs that lose actors follow one another, and are killed several times each.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.elastic_events import JobError, Log
from benchmarks.launchers import ROOT
from benchmarks.turns import in_turns, paired

RANKS, MEGABYTES = 2, 102
_LOSING = 3  # ranks of the jobs that lose one
_CPUS = 8  # of the cluster, as Ray counts them
_STEPS = 200
#: A busy machine takes long to start Ray.
_TRIES = 4
_PATIENCE = {"RAY_raylet_start_wait_time_s": "120", "RAY_agent_register_timeout_ms": "120000"}
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0", "CUDA_VISIBLE_DEVICES": ""}
_TIMEOUT_S = 300.0
#: Jobs that lose an actor: the label, and the command of :func:`job`.
LOSSES = {
    "polyhvd, a warm spare": "spare",
    "polyhvd, no spare": "shrink",
    "Ray Train, which starts all workers again": "train",
}


# What ranks do ----------------------------------------------------------------


def first_step() -> float:
    """Begin a job of polyhvd; return when its first step was done."""
    import polyhvd.torch as hvd
    import torch

    hvd.init()
    hvd.allreduce(torch.ones(1024), name="gradient")
    return time.time()


def first_step_of_train(config: dict[str, Any]) -> None:
    """The same in a process group that Ray Train has made; the time is the content of a file."""
    import torch
    import torch.distributed as dist

    dist.all_reduce(torch.ones(1024))
    (Path(config["folder"]) / str(dist.get_rank())).write_text(str(time.time()))


def steps() -> list[float]:
    """Milliseconds of steps that multiply matrices and sum up a megabyte."""
    import numpy as np
    import polyhvd.numpy as hvd

    hvd.init()
    matrix, gradient = np.ones((160, 160), np.float32), np.ones(1 << 18, np.float32)
    times = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        for _ in range(4):
            matrix @ matrix
        hvd.allreduce(gradient, name="gradient")
        times.append(1e3 * (time.perf_counter() - began))
    hvd.shutdown()
    return times[_STEPS // 10 :]


# Measurements -----------------------------------------------------------------


def start_of_polyhvd() -> float:
    """Seconds from the executor to the last rank's first step."""
    from polyhvd.ray import RayExecutor

    began = time.time()
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=_TIMEOUT_S), num_workers=RANKS)
    executor.start()
    try:
        found: list[float] = executor.run(first_step)
    finally:
        executor.shutdown()
    return max(found) - began


def start_of_train() -> float:
    """Seconds from the trainer to the last worker's first step."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        began = time.time()
        TorchTrainer(
            first_step_of_train,
            train_loop_config={"folder": folder},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=RANKS),
            run_config=RunConfig(storage_path=f"{folder}/results"),
        ).fit()
        return max(float((Path(folder) / str(rank)).read_text()) for rank in range(RANKS)) - began


def steps_on_ray() -> float:
    """The median step of rank 0, in milliseconds."""
    from polyhvd.ray import RayExecutor

    executor = RayExecutor(RayExecutor.create_settings(timeout_s=_TIMEOUT_S), num_workers=RANKS)
    executor.start()
    try:
        return statistics.median(executor.run(steps)[0])
    finally:
        executor.shutdown()


def steps_by_polyhvdrun() -> float:
    """The same of a job of polyhvdrun."""
    run = [sys.executable, "-m", "polyhvd.launch", "-np", str(RANKS), sys.executable, "-c"]
    program = "import json; from benchmarks.on_ray import steps; print('steps', json.dumps(steps()))"
    done = subprocess.run(
        [*run, program], cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
    )
    line = next(line for line in done.stdout.splitlines() if "steps [" in line)
    return statistics.median(json.loads(line[line.index("[", line.index("steps")) :]))


def job(kind: str, folder: Path) -> None:
    """Run an elastic job in the cluster of RAY_ADDRESS until it is killed."""
    import ray

    ray.init(log_to_driver=False)
    if kind == "train":
        _train(folder)
        return
    from polyhvd.ray import ElasticRayExecutor

    least, spares = (_LOSING, 1) if kind == "spare" else (_LOSING - 1, 0)
    settings = ElasticRayExecutor.create_settings(
        least, _LOSING, timeout_s=_TIMEOUT_S, spares=spares, cooldown_range=(0, 0)
    )
    executor = ElasticRayExecutor(settings)
    executor.start()
    executor.run(lambda: _rank(folder))


def _rank(folder: Path) -> None:
    from benchmarks import elastic_hosts_rank

    sys.argv = ["", "torch", str(MEGABYTES), str(folder)]
    elastic_hosts_rank.main()


def _train(folder: Path) -> None:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    from benchmarks import elastic_peer_rank

    TorchTrainer(
        lambda config: elastic_peer_rank.train(MEGABYTES, Path(config["folder"])),
        train_loop_config={"folder": str(folder)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=_LOSING),
        run_config=RunConfig(storage_path=str(folder), failure_config=FailureConfig(max_failures=-1)),
    ).fit()


def losses(kind: str, rounds: int) -> list[float]:
    """Milliseconds from each kill of rank 1's actor to the last rank's first new step."""
    found = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        command = [sys.executable, "-m", "benchmarks.on_ray", "job", kind, name]
        with contextlib.closing(Log(Path(name), command, cwd=ROOT, env=dict(os.environ))) as log:
            for _ in range(rounds):
                world = log.settled(_LOSING, spares=1 if kind == "spare" else 0)
                victim = next(pid for pid, event in world.first.items() if event["rank"] == 1)
                moment = time.monotonic()
                os.kill(victim, 9)
                found.append(log.after(world, moment).step)
    return found


def report(folder: Path, rounds: int) -> None:
    """Measure in a cluster that is started for it; print the tables, and write ray.md and ray.json."""
    import ray

    for tries_left in range(_TRIES)[::-1]:
        try:
            ray.init(
                "local",  # others may have a cluster on this machine
                num_cpus=_CPUS,
                include_dashboard=False,
                object_store_memory=1 << 28,
                log_to_driver=False,
            )
            break
        except Exception:
            if not tries_left:
                raise
            ray.shutdown()
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    lines = ["| jobs on Ray, 2 ranks | polyhvd | peer | ratio | turns |", "|---|---:|---:|---:|---:|"]
    kept: dict[str, Any] = {}

    def add(line: str, **values: Any) -> None:
        kept.update(values)
        lines.append(line)
        print(line, flush=True)

    print("\n".join(lines), flush=True)
    starts = in_turns(start_of_polyhvd, start_of_train, rounds)
    add(paired("from the executor to the first step, beside TorchTrainer", "s", *starts), starts=starts)
    speeds = in_turns(steps_on_ray, steps_by_polyhvdrun, rounds)
    add(paired("a step, beside polyhvdrun", "ms", *speeds), steps=speeds)
    lines += ["", f"| {_LOSING} ranks, {MEGABYTES} MB, an actor killed | first new step, ms | of |"]
    lines += ["|---|---:|---:|"]
    print("\n".join(lines[-3:]), flush=True)
    for label, kind in LOSSES.items():
        try:
            found = losses(kind, rounds)
        except JobError as error:
            add(f"| {label} | not measured: {str(error).splitlines()[0]} | |")
            continue
        spread = f"{statistics.median(found):.0f} ({min(found):.0f} to {max(found):.0f})"
        add(f"| {label} | {spread} | {len(found)} |", **{kind: found})
    (folder / "ray.md").write_text("\n".join([*lines, ""]))
    (folder / "ray.json").write_text(json.dumps(kept, indent=1) + "\n")


def python_of() -> str:
    """The interpreter that has Ray and PyTorch, if they are installed."""
    return str(ROOT / "build" / "peers" / "ray" / "bin" / "python")


def main(folder: Path, *, quick: bool = False) -> int:
    """Have the environment with Ray measure."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if not Path(python_of()).exists():
        print("bench: without Ray: make bench-peers installs it", file=sys.stderr)
        return 1
    command = [python_of(), "-m", "benchmarks.on_ray", "report"]
    options = [str(folder), "1" if quick else "5"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **_PATIENCE, **_QUIET}
    return subprocess.run([*command, *options], cwd=ROOT, env=env).returncode


if __name__ == "__main__":
    if sys.argv[1] == "job":
        job(sys.argv[2], Path(sys.argv[3]))
    else:
        report(Path(sys.argv[2]), int(sys.argv[3]))
