"""AWS's own toolkit starts jobs by its distributions, in two containers with a network between them.

It needs packages that nothing else here needs: so it runs where SAGEMAKER_TOOLKIT names the bin folder of an
environment with sagemaker-training, sagemaker-pytorch-training, mpi4py, the frameworks and polyhvd. `make
matrix` makes one, of the name sagemaker. A job of the mpi distribution takes a minute, in which the
toolkit sleeps; the three here do so at the same time.
"""

from __future__ import annotations

import os
import secrets
import shutil
from contextlib import ExitStack
from pathlib import Path

import joining
import pytest
from toolkit import ToolkitJob

BIN = os.environ.get("SAGEMAKER_TOOLKIT", "")
pytestmark = [
    pytest.mark.skipif(not BIN, reason="SAGEMAKER_TOOLKIT names no environment with the toolkit"),
    pytest.mark.skipif(not joining.can_make_hosts(), reason="needs root, iproute2 and util-linux"),
    pytest.mark.skipif(not all(map(shutil.which, ("mpirun", "ssh-keygen"))), reason="needs MPI and ssh"),
]
HYPERPARAMETERS = {
    "sagemaker_program": '"train.py"',
    "sagemaker_submit_directory": '"/opt/ml/code"',
    "sagemaker_region": '"us-east-1"',
    "learning-rate": "0.01",
}
MPI = {"sagemaker_mpi_enabled": "true", "sagemaker_mpi_custom_mpi_options": '"--oversubscribe"'}
TORCH_DISTRIBUTED = {"sagemaker_torch_distributed_enabled": "true"}
#: AWS's images with PyTorch add that distribution to the toolkit.
OF_PYTORCH = {
    "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
    "POLYHVD_SECRET": secrets.token_hex(32),
}

# Scripts of Horovod's users, in which nothing but the import is another one. Rank r of 4 has the input r + 1,
# so that each of two steps multiplies the weight by 1 - 2 * 0.01 * (1 + 4 + 9 + 16) / 4 = 0.85; of 2 by 0.95.
# Three jobs import their frameworks at once here, so that a rank may come much later than another.
START = """
import argparse, os
os.environ["POLYHVD_START_TIMEOUT"] = "180"
parser = argparse.ArgumentParser()
parser.add_argument("--learning-rate", type=float)
lr = parser.parse_args().learning_rate
"""
END = """
os.write(1, f"rank {hvd.rank()} of {hvd.size()} local {hvd.local_rank()} weight={weight:.4f}\\n".encode())
if hvd.rank() == 0:
    open(os.environ["SM_MODEL_DIR"] + "/model", "w").close()
"""
SCRIPTS = {
    "pytorch": """
import torch
import polyhvd.torch as hvd
hvd.init()
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.constant_(model.weight, 1.0 if hvd.rank() == 0 else 0.0)
optimizer = torch.optim.SGD(model.parameters(), lr=lr)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for step in range(2):
    optimizer.zero_grad()
    model(torch.tensor([[hvd.rank() + 1.0]])).square().sum().backward()
    optimizer.step()
weight = model.weight.item()
""",
    "gluon": """
import polyhvd.mxnet as hvd
import mxnet as mx
hvd.init()
net = mx.gluon.nn.Dense(1, in_units=1, use_bias=False)
net.initialize(mx.init.Constant(1.0 if hvd.rank() == 0 else 0.0))
hvd.broadcast_parameters(net.collect_params(), root_rank=0)
trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": lr})
for step in range(2):
    with mx.autograd.record():
        loss = net(mx.nd.array([[hvd.rank() + 1]])).square()
    loss.backward()
    trainer.step(1)
weight = net.weight.data().asnumpy().item()
""",
    "keras": """
import numpy as np
import tensorflow as tf
import polyhvd.tensorflow.keras as hvd
hvd.init()
dense = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="ones" if hvd.rank() == 0 else "zeros")
model = tf.keras.Sequential([tf.keras.Input((1,)), dense])
model.compile(hvd.DistributedOptimizer(tf.keras.optimizers.SGD(lr)), "mse")
x = np.full((2, 1), hvd.rank() + 1.0)
start = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
model.fit(x, np.zeros((2, 1)), batch_size=1, shuffle=False, verbose=0, callbacks=[start])
weight = float(dense.kernel.numpy()[0, 0])
""",
}


#: How many ranks each container has of a script, and what its weight becomes.
RANKS = {"pytorch": (2, 0.7225), "gluon": (1, 0.9025), "keras": (1, 0.9025)}


@pytest.mark.parametrize(
    ("distribution", "variables", "names"),
    [
        pytest.param(MPI, {}, ("pytorch", "gluon", "keras"), id="mpi"),
        pytest.param(TORCH_DISTRIBUTED, OF_PYTORCH, ("pytorch",), id="torch_distributed"),
        pytest.param(  # starts ranks of any framework by the same code
            TORCH_DISTRIBUTED,
            OF_PYTORCH,
            ("gluon", "keras"),
            marks=pytest.mark.nightly,
            id="torch_distributed of others",
        ),
    ],
)
def test_a_distribution_of_the_toolkit_trains_with_each_framework(
    distribution: dict[str, str], variables: dict[str, str], names: tuple[str, ...], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        jobs = []
        for name in names:
            job = ToolkitJob(name, tmp_path, BIN)
            ranks = {"sagemaker_mpi_num_of_processes_per_host": str(RANKS[name][0])}
            job.prepare(START + SCRIPTS[name] + END, {**HYPERPARAMETERS, **distribution, **ranks})
            jobs.append((job, name, stack.enter_context(job.running(**variables))))
        ended = [(job, name, *job.finish(containers)) for job, name, containers in jobs]
    for job, name, statuses, output in ended:
        assert statuses == [0, 0], output
        on_host, weight = RANKS[name]
        for rank in range(2 * on_host):
            line = f"rank {rank} of {2 * on_host} local {rank % on_host} weight={weight}"
            assert line in output, output
        assert [path.name for base in job.bases for path in (base / "model").iterdir()] == ["model"]


def test_torch_distributed_without_a_secret_says_what_the_estimator_needs(tmp_path: Path) -> None:
    job = ToolkitJob("secretless", tmp_path, BIN)
    job.prepare("import polyhvd.numpy as hvd\nhvd.init()\n", {**HYPERPARAMETERS, **TORCH_DISTRIBUTED})
    with job.running(SAGEMAKER_TRAINING_MODULE="sagemaker_pytorch_container.training:main") as containers:
        statuses, output = job.finish(containers)
    assert all(statuses), output
    assert 'Set one in the estimator: environment={"POLYHVD_SECRET": secrets.token_hex(32)}' in output, output
    assert all((base / "output/failure").exists() for base in job.bases)
