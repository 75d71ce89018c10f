"""Two of SageMaker's containers train with each framework: to the end, with a failure, and until SIGTERM."""

from __future__ import annotations

import importlib.util
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from containers import Containers

pytestmark = pytest.mark.slow

START = "import os\nfrom polyhvd.sagemaker import checkpoint_dir, model_dir\n"
TORCH = START + (
    "import torch\n"
    "import polyhvd.torch as hvd\n"
    "hvd.init()\n"
    "model = torch.nn.Linear(4, 1)\n"
    "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
    "optimizer = torch.optim.SGD(model.parameters(), lr=0.01)\n"
    "optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())\n"
    "for step in range(3):\n"
    "  optimizer.zero_grad()\n"
    "  loss = model(torch.full((2, 4), hvd.rank() + 1.0)).square().mean()\n"
    "  loss.backward()\n"
    "  optimizer.step()\n"
    "  print(f'loss={loss.item():.3f}')\n"
    "if folder := model_dir(): torch.save(model.state_dict(), folder + '/model.pt')\n"
)
GLUON = START + (
    "import polyhvd.mxnet as hvd\n"
    "import mxnet as mx\n"
    "from mxnet import autograd, gluon\n"
    "hvd.init()\n"
    "net = gluon.nn.Dense(1, in_units=4)\n"
    "net.initialize()\n"
    "hvd.broadcast_parameters(net.collect_params())\n"
    "trainer = hvd.DistributedTrainer(net.collect_params(), 'sgd', {'learning_rate': 0.01})\n"
    "for step in range(100):\n"
    "  if hvd.rank() == 1 and step == 2: raise ValueError('bad record')\n"
    "  with autograd.record(): loss = net(mx.nd.ones((2, 4))).square().mean()\n"
    "  loss.backward()\n"
    "  trainer.step(2)\n"
    "  print(f'loss={loss.asscalar():.3f}')\n"
)
KERAS = START + (
    "import signal\n"
    "import numpy as np, tensorflow as tf\n"
    "import polyhvd.keras as hvd\n"
    "hvd.init()\n"
    "model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(1)])\n"
    "model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), 'mse')\n"
    "def save(*_):\n"
    "  if hvd.rank() == 0: model.save_weights(checkpoint_dir() + '/last.weights.h5')\n"
    "  os._exit(0)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "class Say(tf.keras.callbacks.Callback):\n"
    "  def on_epoch_end(self, epoch, logs):\n"
    "    if epoch == 1: os.write(1, b'trained\\n')\n"
    "model.fit(np.ones((8, 4)), np.ones(8), epochs=1000000, verbose=0, callbacks=[Say()])\n"
)


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Containers]:
    def start(framework: str, source: str) -> Containers:
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"needs {framework}")
        return Containers(tmp_path, 2).start(source, "--start-timeout", "60")

    return start


def test_pytorch_trains_and_rank_0_alone_saves_the_model(start: Callable[..., Containers]) -> None:
    job = start("torch", TORCH)
    ended = job.finish()
    assert [status for status, _, _ in ended] == [0, 0], ended
    assert ended[0][1].count("loss=") == 6
    assert [path.name for base in job.bases for path in (base / "model").iterdir()] == ["model.pt"]


def test_gluon_s_first_failure_is_what_both_containers_tell(start: Callable[..., Containers]) -> None:
    job = start("mxnet", GLUON)
    assert [status for status, _, _ in job.finish()] == [1, 1]
    for text in job.failures():
        assert text.startswith(f"rank 1 on {job.hosts[1]} exited with status 1\n")
        assert text.endswith("ValueError: bad record")


def test_keras_saves_a_checkpoint_at_sigterm(start: Callable[..., Containers]) -> None:
    job = start("tensorflow", KERAS)
    job.wait_for(b"trained", 2)
    for process in job.processes:
        process.send_signal(signal.SIGTERM)
    assert [status for status, _, _ in job.finish()] == [143, 143]
    saved = [path.name for base in job.bases for path in (base / "checkpoints").iterdir()]
    assert saved == ["last.weights.h5"]
