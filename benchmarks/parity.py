"""The cost of watching: ``python -m benchmarks --only parity``.

A step of a network of three dense layers on two ranks, with and without ``parity.watch``, in blocks that take
turns in the same processes; and with hooks that do nothing, which is the least that any watch costs. Ranks
have one thread each, and an optimizer with momentum for each: where gradients are averaged, steps are
longer, and what a watch adds is the same.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.launchers import ROOT

#: With its inputs first. The second one is that of the catalogue of ``polyhvd parity``.
NETWORKS = {"784-256-128-10": (784, 256, 128, 10), "16-32-32-5": (16, 32, 32, 5)}
BATCHES = (32, 128, 1024)
RATE, MOMENTUM = 0.01, 0.9
_TIMEOUT_S = 600.0
#: Steps of a block, and blocks of each way.
_STEPS, _BLOCKS = 20, 12

Array = np.ndarray[Any, Any]
#: Milliseconds of the median step, by way.
Row = dict[str, float]


# In a rank ------------------------------------------------------------------


def _nothing(*_: Any) -> None:
    """The cost of a hook that does nothing."""


class Torch:
    """A model of PyTorch and its step."""

    name = "PyTorch"

    def __init__(self, sizes: Sequence[int], images: Array, labels: Array) -> None:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        layers: list[Any] = []
        for inputs, units in itertools.pairwise(sizes):
            layers += [torch.nn.Linear(inputs, units), torch.nn.ReLU()]
        self.model = torch.nn.Sequential(*layers[:-1])
        self.optimizer = torch.optim.SGD(self.model.parameters(), RATE, MOMENTUM)
        self._images, self._labels = torch.from_numpy(images), torch.from_numpy(labels)
        self._loss = torch.nn.functional.cross_entropy

    def step(self) -> None:
        self.optimizer.zero_grad()
        self._loss(self.model(self._images), self._labels).backward()
        self.optimizer.step()


class Keras:
    """A model of Keras, run eagerly."""

    name = "Keras"

    def __init__(self, sizes: Sequence[int], images: Array, labels: Array) -> None:
        import keras
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)
        keras.utils.set_random_seed(0)
        dense = keras.layers.Dense
        layers = [dense(units, "relu") for units in sizes[1:-1]]
        self.model = keras.Sequential([keras.layers.Input((sizes[0],)), *layers, dense(sizes[-1])])
        self.optimizer = keras.optimizers.SGD(RATE, MOMENTUM)
        self.model.compile(
            self.optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), run_eagerly=True
        )
        self._images, self._labels = tf.constant(images), tf.constant(labels)

    def step(self) -> None:
        self.model.train_step((self._images, self._labels))


class Gluon:
    """A model of Gluon, not hybridized."""

    name = "Gluon"

    def __init__(self, sizes: Sequence[int], images: Array, labels: Array) -> None:
        import mxnet as mx
        from mxnet.gluon import nn

        mx.random.seed(0)
        self.model = nn.HybridSequential()
        last = len(sizes) - 2
        for number, (inputs, units) in enumerate(itertools.pairwise(sizes)):
            self.model.add(nn.Dense(units, activation="relu" if number < last else None, in_units=inputs))
        self.model.initialize(mx.init.Xavier())
        self.optimizer = mx.gluon.Trainer(
            self.model.collect_params(), "sgd", {"learning_rate": RATE, "momentum": MOMENTUM}, kvstore=None
        )
        self._loss = mx.gluon.loss.SoftmaxCrossEntropyLoss()
        self._images, self._labels = mx.nd.array(images), mx.nd.array(labels)
        self._record, self._wait = mx.autograd.record, mx.nd.waitall

    def step(self) -> None:
        with self._record():
            loss = self._loss(self.model(self._images), self._labels).mean()
        loss.backward()
        self.optimizer.step(1)
        self._wait()


class HybridizedGluon(Gluon):
    """A model of Gluon that is hybridized, but while it is watched."""

    name = "Gluon, hybridized"

    def __init__(self, sizes: Sequence[int], images: Array, labels: Array) -> None:
        super().__init__(sizes, images, labels)
        self.model.hybridize()


#: By framework.
MODELS: dict[str, tuple[Any, ...]] = {
    "torch": (Torch,),
    "tensorflow": (Keras,),
    "mxnet": (Gluon, HybridizedGluon),
}


@contextlib.contextmanager
def hooked(net: Any) -> Iterator[None]:
    """Install hooks that do nothing at all places where a watch has them."""
    from polyhvd.parity.models import reader_of, weights_of
    from polyhvd.parity.recording import layers_of

    framework: Any = reader_of(net.model)
    ends = [framework.on_input(weight.layer, _nothing) for weight in layers_of(weights_of(net.model))]
    ends.append(framework.on_output(net.model, _nothing))
    ends.append(framework.on_step(net.optimizer, lambda _: contextlib.nullcontext()))
    yield
    for end in reversed(ends):
        end()


@contextlib.contextmanager
def watched(net: Any) -> Iterator[None]:
    """Watch the model; no divergence may be found."""
    from polyhvd import parity

    with parity.watch(net.model, net.optimizer) as watch:
        yield
    assert watch.first is None, watch


@contextlib.contextmanager
def alone(_: Any) -> Iterator[None]:
    """Add nothing to the model."""
    yield


WAYS = {"alone": alone, "hooks": hooked, "watch": watched}


def timed(net: Any, barrier: Callable[[], Any], *, steps: int, blocks: int) -> Row:
    """The median step of each way, in turns; the first block of each does not count."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(blocks + 1):
        for way, context in WAYS.items():
            with context(net):
                net.step()
                barrier()
                for _ in range(steps):
                    begin = time.perf_counter()
                    net.step()
                    if number:
                        times[way].append(1e3 * (time.perf_counter() - begin))
                barrier()
    return {way: statistics.median(each) for way, each in times.items()}


def rank(framework: str, steps: int, blocks: int, out: Path) -> None:
    """Measure all networks and batches in one framework, as a rank of a job."""
    import importlib

    hvd = importlib.import_module(f"polyhvd.{framework}")
    hvd.init()
    found = []
    for model, (network, sizes), batch in itertools.product(MODELS[framework], NETWORKS.items(), BATCHES):
        rng = np.random.default_rng(0)
        images = rng.standard_normal((batch, sizes[0]), np.float32)
        net = model(sizes, images, rng.integers(0, sizes[-1], batch))
        medians = timed(net, hvd.barrier, steps=steps, blocks=blocks)
        found.append({"framework": model.name, "network": network, "batch": batch, "ms": medians})
    if hvd.rank() == 0:
        out.write_text(json.dumps(found))
    hvd.shutdown()


# In the program that starts them ----------------------------------------------


def measure(framework: str, folder: Path, *, quick: bool) -> list[dict[str, Any]]:
    """Measure one framework in a job of two ranks."""
    out = folder / f"parity.{framework}.json"
    launcher = [sys.executable, "-m", "polyhvd.launch", "-np", "2"]
    effort = [str(_STEPS), str(2 if quick else _BLOCKS)]
    command = [*launcher, sys.executable, "-m", "benchmarks.parity", framework, *effort, str(out)]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
    }
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=_TIMEOUT_S)
    found: list[dict[str, Any]] = json.loads(out.read_text())
    out.unlink()
    return found


def line(found: dict[str, Any]) -> str:
    """A row of the table."""
    ms = found["ms"]
    cells = " | ".join(f"{ms[way]:.3f}" for way in WAYS)
    ratio = ms["watch"] / ms["alone"]
    where = f"{found['framework']} | {found['network']} | {found['batch']}"
    return f"| {where} | {cells} | {ratio:.2f} |"


def main(folder: Path, *, quick: bool = False) -> int:
    """Measure all frameworks that are installed, print the table, and write parity.md and parity.json."""
    import importlib.util

    lines = ["# Watching", "", "Milliseconds of a step, medians; 2 ranks.", ""]
    lines += ["| framework | dense layers | batch | alone | hooks alone | watch | watch / alone |"]
    lines += ["|---|---|---:|---:|---:|---:|---:|"]
    print("\n".join(lines), flush=True)
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kept = []
    with tempfile.TemporaryDirectory() as scratch:
        for framework in MODELS:
            if importlib.util.find_spec(framework) is None:
                continue
            for found in measure(framework, Path(scratch), quick=quick):
                kept.append(found)
                lines.append(line(found))
                print(lines[-1], flush=True)
    (folder / "parity.md").write_text("\n".join([*lines, ""]))
    (folder / "parity.json").write_text(json.dumps(kept, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    rank(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
