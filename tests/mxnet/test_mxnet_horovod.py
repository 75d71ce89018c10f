"""What was written for Horovod runs: its names, in its order, with its defaults, and a whole program."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("horovod_script.py")
DEADLINE_S = 180.0  # for hangs only


@pytest.mark.parametrize(
    "options", [[], ["--use-fp16", "--gradient-predivide-factor", "2"]], ids=["plain", "fp16"]
)
def test_a_program_written_for_horovod_trains(python_of_ranks, options):
    finished = subprocess.run(
        [sys.executable, "-m", "polyhvd.launch", "-np", "2", *python_of_ranks(2), str(SCRIPT), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "validation accuracy" in finished.stdout


WORLD = "process_set=global_process_set"
REDUCTION = f"average=None name=None priority=0 prescale_factor=1.0 postscale_factor=1.0 {WORLD} op=None"
SCATTERING = f"op=Average name=None priority=0 {WORLD} prescale_factor=1.0 postscale_factor=1.0"
MOVEMENT = f"name=None priority=0 {WORLD}"

#: Horovod's arguments, in its order; what we have beyond them comes after.
SIGNATURES = {
    "allreduce": f"tensor {REDUCTION}",
    "allreduce_": f"tensor {REDUCTION}",
    "grouped_allreduce": f"tensors {REDUCTION}",
    "grouped_allreduce_": f"tensors {REDUCTION}",
    "allgather": f"tensor {MOVEMENT}",
    "grouped_allgather": f"tensors {MOVEMENT}",
    "broadcast": f"tensor root_rank {MOVEMENT}",
    "broadcast_": f"tensor root_rank {MOVEMENT}",
    "alltoall": f"tensor splits=None {MOVEMENT}",
    "reducescatter": f"tensor {SCATTERING}",
    "grouped_reducescatter": f"tensors {SCATTERING}",
    "broadcast_object": f"obj=None root_rank=0 name=None {WORLD}",
    "allgather_object": "obj name=None",
    "broadcast_parameters": "params root_rank=0 prefix=None",
    "DistributedOptimizer": f"optimizer gradient_predivide_factor=1.0 num_groups=0 {WORLD}",
    "DistributedTrainer": (
        "params optimizer optimizer_params=None compression=none gradient_predivide_factor=1.0 prefix=None "
        f"num_groups=0 {WORLD}"
    ),
    "start_timeline": "file_path mark_cycles=False",
    "ProcessSet": "ranks_or_comm",
    **dict.fromkeys(("shutdown", "is_initialized", "stop_timeline", "rank", "size", "local_rank"), ""),
    **dict.fromkeys(("local_size", "cross_rank", "cross_size", "is_homogeneous"), ""),
}
#: Ours; the arguments that a caller of these may rely on.
OWN = {
    "SyncBatchNorm": (
        "in_channels=0 momentum=0.9 epsilon=1e-05 center=True scale=True use_global_stats=False "
        "beta_initializer='zeros' gamma_initializer='ones' running_mean_initializer='zeros' "
        f"running_variance_initializer='ones' {WORLD}"
    ),
    "broadcast_optimizer_state": f"trainer root_rank=0 {WORLD}",
}


def described(hvd, parameter):
    default = parameter.default
    if default is inspect.Parameter.empty:
        return parameter.name
    known = {id(hvd.global_process_set): "global_process_set", id(hvd.Compression.none): "none"}
    shown = "Average" if parameter.name == "op" and default == hvd.Average and default is not None else None
    return f"{parameter.name}={shown or known.get(id(default)) or repr(default)}"


@pytest.mark.ranks(1)
def test_names_arguments_and_defaults_are_horovods(hvd, mx, np):
    wrong = []
    for name, expected in {**SIGNATURES, **OWN}.items():
        parameters = [
            described(hvd, p)
            for p in inspect.signature(getattr(hvd, name)).parameters.values()
            if p.kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
        ]
        wanted = expected.split()
        if parameters[: len(wanted)] != wanted:
            wrong.append(f"{name}: {parameters}, not {wanted}")
        # What comes after has a default, or a call as Horovod's documentation has it would fail.
        if any("=" not in extra for extra in parameters[len(wanted) :]):
            wrong.append(f"{name}: {parameters[len(wanted) :]} must have defaults")
    assert not wrong, "\n".join(wrong)
    assert [hvd.Average, hvd.Sum, hvd.Adasum, hvd.Min, hvd.Max, hvd.Product] == list(range(6))
    assert {"none", "fp16", "bf16"} <= set(dir(hvd.Compression))
