"""Ranks with different numbers of batches, and calls in different order: the errors that users get."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fork_servers import IMPORTS, SETTINGS, ForkServers  # tests/harness, on the path by tests/conftest.py
from launching import ROOT

pytestmark = pytest.mark.slow

DEADLINE_S = 300.0  # for liveness only: imports of three TensorFlows on two cores
Run = Callable[..., tuple[str, str]]
CURE = "give every rank the same number of batches, or call hvd.join()"

BEGIN = """
import sys
import numpy as np
steps = [int(number) for number in sys.argv[1].split(",")]
"""
# Whoever raises says so with the whole text, on one line of its own, and stays until the others with as many
# steps have come as far: to those that are late a rank that is gone would be the one that ended first.
END = """
except Exception as error:
    print("RAISED", hvd.rank(), str(error).replace("\\n", " "), flush=True)
    import os, pathlib, time
    folder = pathlib.Path(os.environ["POLYHVD_FLIGHT_DIR"])
    (folder / f"raised.{hvd.rank()}").touch()
    give_up_at = time.monotonic() + 20
    while len(list(folder.glob("raised.*"))) < steps.count(max(steps)) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    raise
"""
SCRIPTS = {
    "numpy": """
import polyhvd.numpy as hvd
hvd.init()
try:
    for i in range(steps[hvd.rank()]):
        hvd.allreduce(np.full(4, hvd.rank() + i), name="gradient.3")
""",
    "torch": """
import torch
import polyhvd.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
try:
    for i in range(steps[hvd.rank()]):
        optimizer.zero_grad()
        model(torch.full((3, 4), float(hvd.rank() + i))).sum().backward()
        optimizer.step()
""",
    "mxnet": """
np.bool = bool
import mxnet as mx
import polyhvd.mxnet as hvd
hvd.init()
model = mx.gluon.nn.Dense(2, in_units=4)
model.initialize()
trainer = hvd.DistributedTrainer(model.collect_params(), "sgd", {"learning_rate": 0.1})
try:
    for i in range(steps[hvd.rank()]):
        with mx.autograd.record():
            loss = model(mx.nd.full((3, 4), hvd.rank() + i)).sum()
        loss.backward()
        trainer.step(3)
        model.weight.data().asnumpy()
""",
    "tensorflow": """
import tensorflow as tf
import polyhvd.tensorflow as hvd
hvd.init()
weight = tf.Variable(tf.ones((4, 2)))

@tf.function
def step(batch):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(batch @ weight)
    (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
    weight.assign_sub(0.1 * gradient)

try:
    for i in range(steps[hvd.rank()]):
        step(tf.fill((3, 4), float(hvd.rank() + i)))
""",
    "keras": """
import tensorflow as tf
import polyhvd.tensorflow.keras as hvd
hvd.init()
model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(2)])
model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1)), "mse")
rows = 3 * steps[hvd.rank()]
try:
    model.fit(np.full((rows, 4), hvd.rank() + 1.0), np.ones((rows, 2)), batch_size=3, verbose=0)
""",
}


@pytest.fixture
def run(tmp_path: Path, fork_servers: ForkServers) -> Run:
    """``run(framework, ranks, source, *words, **env)`` runs a job that is to fail; returns what it wrote."""

    def run(framework: str, ranks: int, source: str, *words: str, **env: str) -> tuple[str, str]:
        module = {"keras": "tensorflow"}.get(framework, framework)
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
        script = tmp_path / "train.py"
        script.write_text(source)
        python = fork_servers.python(ranks, IMPORTS[module]) if module in IMPORTS else [sys.executable]
        known = {**os.environ, **SETTINGS, "POLYHVD_FLIGHT_DIR": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-m", "polyhvd.launch", "-np", str(ranks), *python, str(script), *words],
            cwd=ROOT,
            env={**known, "POLYHVD_START_TIMEOUT": "200", **env},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
        )
        assert done.returncode != 0, done.stdout
        return done.stdout, done.stderr

    return run


@pytest.mark.parametrize("batches", ["3,5", "5,3,5"])
@pytest.mark.parametrize("framework", SCRIPTS)
def test_uneven_data_are_told_with_the_ranks_and_their_steps(framework: str, batches: str, run: Run) -> None:
    steps = [int(number) for number in batches.split(",")]
    source = BEGIN + SCRIPTS[framework] + END
    out, err = run(framework, len(steps), source, batches)
    first = steps.index(3)
    raised = re.findall(r"RAISED (\d) (.*)", out)
    assert raised, out + err
    for rank, text in raised:
        assert int(rank) != first
        assert "call shutdown() on every rank" not in text
        assert f"rank {first}, which" in text, text
        assert "it finished after its 3rd allreduce of '" in text, text
        assert re.search(r"while ranks? [\d, -]+ (is|are) at (its|their) 4th: ", text), text
        assert CURE in text
    # The launcher's own output, whose last lines are the first cause, has it, too.
    assert "finished after its 3rd allreduce of" in err + out
    assert CURE in err + out


def test_a_rank_that_joins_last_by_ending_is_told_to_join(run: Run) -> None:
    source = """
import polyhvd.numpy as hvd
hvd.init()
if hvd.rank() > 0:
    hvd.join()
"""
    _, err = run("numpy", 3, source)
    assert "hvd.join()" in err
    assert "call shutdown() on every rank" not in err


STALLS = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}


def test_calls_in_different_order_are_told_with_their_cause_and_cure(run: Run) -> None:
    source = """
import torch
import polyhvd.torch as hvd
hvd.init()
model = torch.nn.Linear(4, 2)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
for step in range(3):
    optimizer.zero_grad()
    loss = model(torch.full((3, 4), hvd.rank() + 1.0)).sum()
    if hvd.rank() == 0 or step < 2:
        loss.backward()
        hvd.allreduce(loss.detach(), name="loss")
    else:
        hvd.allreduce(loss.detach(), name="loss")
        loss.backward()
    optimizer.step()
"""
    _, err = run("torch", 2, source, **STALLS)
    assert "they wait for each other: " in err, err
    assert re.search(r"rank 0 is at its 3rd allreduce of 'DistributedOptimizer[^']*'", err), err
    assert "rank 1 is at its 3rd allreduce of 'loss'" in err
    assert "make them in the same order on every rank" in err
    assert "backward() ends when the gradients are reduced" in err


def test_a_rank_in_another_collective_is_told_with_both_causes(run: Run) -> None:
    source = """
import numpy as np
import polyhvd.numpy as hvd
hvd.init()
for step in range(4 if hvd.rank() == 1 else 6):
    hvd.allreduce(np.full(3, hvd.rank()), name="gradient.3")
hvd.allreduce(np.ones(1), name="accuracy")
"""
    _, err = run("numpy", 3, source, **STALLS)
    assert "they wait for each other: " in err, err
    assert "ranks 0, 2 are at their 5th allreduce of 'gradient.3'" in err
    assert "rank 1 is at its 1st allreduce of 'accuracy'" in err
    assert f"Or they have different numbers of batches: {CURE}" in err


def test_a_rank_whose_program_has_ended_is_told_with_its_steps(run: Run) -> None:
    """A thread keeps its process, so that it has not left."""
    source = """
import threading, time
import numpy as np
import polyhvd.numpy as hvd
hvd.init()
for step in range(2 if hvd.rank() == 1 else 6):
    hvd.allreduce(np.full(3, hvd.rank()), name="gradient.3")
if hvd.rank() == 1:
    threading.Thread(target=time.sleep, args=(20,)).start()
"""
    _, err = run("numpy", 2, source, **STALLS)
    assert re.search(
        r"rank 1: it finished after its 2nd allreduce of 'gradient.3', while rank 0 is at its 3rd: ", err
    ), err
    assert CURE in err
