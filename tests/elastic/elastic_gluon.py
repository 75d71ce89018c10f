"""A Gluon network that trains in an elastic job. Arguments: a file that is there once a rank was killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import numpy as np
import polyhvd.mxnet as hvd

# isort: split
import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn

hvd.init()
mx.random.seed(42)
random = np.random.default_rng(3)
inputs = mx.nd.array(random.normal(size=(512, 10)))
targets = mx.nd.array((inputs.asnumpy() @ random.normal(size=(10, 3))).argmax(1))

net = nn.HybridSequential()
net.add(nn.Dense(32, activation="relu"), nn.Dense(3))
net.initialize(mx.init.Xavier())
net(inputs[:1])
net.hybridize()
trainer = hvd.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.01})
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()


@hvd.elastic.run
def train(state: Any) -> None:
    while state.step < 150:
        begin = (state.step * hvd.size() + hvd.rank()) * 16 % 512
        if hvd.rank() == 1 and state.step == 40 and not os.path.exists(sys.argv[1]):
            open(sys.argv[1], "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        with autograd.record():
            loss = loss_of(net(inputs[begin : begin + 16]), targets[begin : begin + 16])
        loss.backward()
        trainer.step(16)
        state.step += 1
        if state.step % 30 == 0:
            print(f"losses {loss.mean().asscalar():.3f}", flush=True)
        time.sleep(0.02)
        state.commit()


state = hvd.elastic.GluonState(net, trainer, step=0)
train(state)
total = sum(float(item.data().asnumpy().astype("float64").sum()) for item in net.collect_params().values())
updater = trainer._updaters[0]
moments = sum(
    float(part.asnumpy().astype("float64").sum()) for pair in updater.states.values() for part in pair
)
counts = sorted(set(updater.optimizer._index_update_count.values()))
print("end", total.hex(), moments.hex(), counts, flush=True)
