"""The examples for Ray, and scripts as users of Horovod have them: only the import differs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
EXAMPLES = TESTS.parent / "examples"  # copied beside the tests
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
#: Those of the suite, which tools/matrix.py names; only ranks see them.
PACKAGES = os.environ.get("SUITE_PACKAGES", "")
BUSY_S = 240.0


def run(words: list[str], cluster: str) -> list[str]:
    """The lines of standard output of a driver that connects to the tests' cluster."""
    script = [sys.executable, *words, "--address", cluster]
    done = subprocess.run(script, capture_output=True, text=True, timeout=BUSY_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout.splitlines()


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["numpy", "elastic"])
@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
def test_example_trains_on_fashion_mnist(name: str, cluster: str) -> None:
    words = ["--data", "fashion-mnist", "--epochs", "2", "--batch-size", "128"]
    last = re.match(r"test accuracy ([\d.]+)", run([str(EXAMPLES / f"ray_{name}.py"), *words], cluster)[-1])
    assert last is not None
    assert float(last[1]) > 0.75


@pytest.mark.parametrize("name", ["numpy", "elastic"])
def test_example_trains_with_a_falling_loss(name: str, cluster: str) -> None:
    lines = run([str(EXAMPLES / f"ray_{name}.py"), "--epochs", "10"], cluster)
    losses = [float(found[1]) for line in lines if (found := re.search(r"^epoch .*loss ([\d.]+)", line))]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 2
    last = re.match(r"test accuracy ([\d.]+)", lines[-1])
    assert last, lines
    assert float(last[1]) > 0.93


PAGE = TESTS.parent / "docs" / "ray.md"
#: The last line that each program of the page prints, by the heading above it.
PROGRAMS = {
    "A first job": r"\[\(0, array\(\[0\.05, .*\), \(1, array\(\[0\.05, .*\)\]",
    "Elastic jobs": r"\[(1\. *| *){10}\]",
    "Your own actors": r"\[\(0, 4, array\(\[4\., 4\.\].*\), \(1, .*\), \(2, .*\), \(3, .*\)\]",
    "Ray Train": r"\{'loss': [\d.e-]+\}",
    "Tune": r"\{'lr': 0\.\d+\}",
}
_OFTEN = ("Elastic jobs", "Your own actors")  # BASIC below has the calls of the first


def programs() -> list[tuple[str, str]]:
    """The heading and the text of each program of the page."""
    blocks = re.compile(r"^## ([^\n]*)$|^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found, heading = [], ""
    for block in blocks.finditer(PAGE.read_text()):
        heading = block[1] or heading
        if block[2]:
            found.append((heading, block[2]))
    return found


def test_each_program_of_the_page_is_tested() -> None:
    assert [heading for heading, _ in programs()] == list(PROGRAMS)


@pytest.mark.parametrize(
    "heading",
    [pytest.param(name, marks=[] if name in _OFTEN else pytest.mark.nightly) for name in PROGRAMS],
)
def test_the_program_of_the_page_runs_as_it_is(heading: str, cluster: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(dict(programs())[heading])
    env = {**os.environ, "RAY_ADDRESS": cluster, "HOME": str(tmp_path)}  # where it writes checkpoints
    words = [sys.executable, "train.py"]
    done = subprocess.run(words, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=BUSY_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert re.fullmatch(PROGRAMS[heading], done.stdout.splitlines()[-1]), done.stdout


BASIC = """
import sys

import numpy as np
import ray
from polyhvd.ray import RayExecutor
import polyhvd.numpy as hvd

ray.init(address=sys.argv[2])
settings = RayExecutor.create_settings(timeout_s=60)
executor = RayExecutor(settings, num_workers=2, use_gpu=False)
executor.start()


def size_and_rank():
    hvd.init()
    return hvd.size(), hvd.rank()


assert executor.run(size_and_rank) == [(2, 0), (2, 1)]
assert ray.get(executor.run_remote(size_and_rank)) == [(2, 0), (2, 1)]
assert executor.run(lambda a, b: a + b, args=[1], kwargs={"b": 2}) == [3, 3]
executor.shutdown()


class Accumulator:
    def __init__(self, start, scale=1):
        hvd.init()
        self.total, self.scale = start, scale

    def add(self, value):
        self.total += self.scale * float(hvd.allreduce(np.array([value + hvd.rank()]), op=hvd.Sum)[0])
        return self.total


executor = RayExecutor(settings, num_hosts=2, num_workers_per_host=1)
executor.start(executable_cls=Accumulator, executable_args=[10], executable_kwargs={"scale": 2})
assert executor.execute(lambda worker: worker.add(1)) == [16.0, 16.0]
assert executor.execute(lambda worker: worker.add(0)) == [18.0, 18.0]
assert executor.execute_single(lambda worker: worker.total) == 18.0
executor.shutdown()
print("done")
"""

ELASTIC = """
import sys

import numpy as np
import ray
from polyhvd.ray import ElasticRayExecutor, RayExecutor
import polyhvd.numpy as hvd


def training_fn():
    hvd.init()
    state = hvd.elastic.ArrayState(weight=np.ones(2), batch=0)

    @hvd.elastic.run
    def train(state):
        while state.batch < 5:
            state.weight *= hvd.allreduce(np.full(2, 2.0), name="factor")
            state.batch += 1
            state.commit()
        return state.weight.tolist()

    return train(state)


ray.init(address=sys.argv[2])
settings = ElasticRayExecutor.create_settings(min_np=2, max_np=2, verbose=True)
executor = ElasticRayExecutor(settings, use_gpu=False, cpus_per_slot=1)
executor.start()
assert executor.run(training_fn) == [[32.0, 32.0]] * 2

settings = RayExecutor.create_settings(timeout_s=60)
executor = RayExecutor(settings, min_workers=1, max_workers=2, cpus_per_worker=1)
executor.start()
assert executor.run(training_fn) == [[32.0, 32.0]] * 2
executor.shutdown()
print("done")
"""


@pytest.mark.parametrize("script", [BASIC, ELASTIC], ids=["basic", "elastic"])
def test_scripts_of_horovod_run_with_the_import_changed(script: str, cluster: str) -> None:
    assert run(["-c", script], cluster)[-1] == "done"


# PyTorch with an elastic sampler, and TensorFlow with a gradient tape: the ranks append to their path.

IMAGES = f"""
import sys

sys.path.append({str(EXAMPLES)!r})
import common
import ray

images = common.load("fashion-mnist")[0].first(6000)
ray.init(address=sys.argv[2])
shared = ray.put((images.pixels, images.labels))
packages = {PACKAGES!r}
"""

TORCH = """
from polyhvd.ray import ElasticRayExecutor


def training_fn():
    sys.path.append(packages)
    import polyhvd.torch as hvd
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    hvd.init()
    pixels, labels = (torch.from_numpy(array.copy()) for array in ray.get(shared))
    dataset = TensorDataset(pixels, labels)
    sampler = hvd.elastic.ElasticSampler(dataset, shuffle=True)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * hvd.size(), momentum=0.5)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())

    def on_state_reset():
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * hvd.size()

    @hvd.elastic.run
    def train(state):
        for state.epoch in range(state.epoch, 3):
            for number, (x, y) in enumerate(loader):
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
                state.sampler.record_batch(number, 32)
                if number % 20 == 0:
                    state.commit()
            state.sampler.set_epoch(state.epoch + 1)

    state = hvd.elastic.TorchState(model=model, optimizer=optimizer, epoch=0, sampler=sampler)
    state.register_reset_callbacks([on_state_reset])
    train(state)
    return float((model(pixels).argmax(dim=1) == labels).float().mean())


executor = ElasticRayExecutor(ElasticRayExecutor.create_settings(min_np=1, max_np=2), use_gpu=False)
executor.start()
accuracies = executor.run(training_fn)
assert len(set(accuracies)) == 1 and accuracies[0] > 0.75, accuracies
print("done")
"""

TENSORFLOW = """
from polyhvd.ray import RayExecutor


def train(num_epochs):
    sys.path.append(packages)
    import polyhvd.tensorflow as hvd
    import tensorflow as tf

    hvd.init()
    pixels, labels = ray.get(shared)
    mine = slice(hvd.rank(), None, hvd.size())
    dataset = tf.data.Dataset.from_tensor_slices((pixels[mine], labels[mine])).shuffle(1000).batch(32)
    layers = tf.keras.layers
    model = tf.keras.Sequential([tf.keras.Input((28, 28)), layers.Flatten(), layers.Dense(10)])
    loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = tf.keras.optimizers.SGD(0.02 * hvd.size())

    @tf.function
    def training_step(x, y):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        tape = hvd.DistributedGradientTape(tape)
        weights = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(value, weights), weights))

    hvd.broadcast_variables(model.variables, root_rank=0)
    for _ in range(num_epochs):
        for x, y in dataset:
            training_step(x, y)
    return float((model(pixels).numpy().argmax(axis=1) == labels).mean())


executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=2, use_gpu=False)
executor.start()
accuracies = executor.run(train, kwargs={"num_epochs": 3})
executor.shutdown()
assert len(set(accuracies)) == 1 and accuracies[0] > 0.75, accuracies
print("done")
"""


@pytest.mark.nightly
@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason="Debian's dataset-fashion-mnist is not installed")
@pytest.mark.parametrize(("framework", "script"), [("torch", TORCH), ("tensorflow", TENSORFLOW)])
def test_scripts_of_horovod_train_on_images(framework: str, script: str, cluster: str) -> None:
    if not Path(PACKAGES, framework).is_dir():
        pytest.skip(f"SUITE_PACKAGES names no folder with {framework}")
    assert run(["-c", IMAGES + script], cluster)[-1] == "done"
