"""A learning rate that is halved in Gluon, whose momentum contains the old rate; PyTorch's does not."""

import numpy as np
import polyhvd.mxnet as hvd  # first: MXNet alone does not import under newer versions of NumPy

# isort: split
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

from polyhvd import parity

FAULT = True
DEFECT = {
    "case": "two dense layers, 5 steps",
    "scripts": ["reference_halving_in_torch.py", "rate_in_momentum.py"],
    "in": "mxnet",
    "layer": "all",
    "step": 3,
    "kind": "update",
    "aside": True,
}

hvd.init()
model = nn.Sequential()
model.add(nn.Dense(12, activation="tanh", in_units=8), nn.Dense(3, in_units=12))
model.initialize()
parity.load(model, from_=0)
trainer = gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

with parity.watch(model, trainer):
    for step in range(5):
        if step == 3:
            trainer.set_learning_rate(0.05)
            if not FAULT:
                for velocity in trainer._updaters[0].states.values():
                    velocity *= 0.5
        inputs = np.random.default_rng(step).standard_normal((12, 8), np.float32)
        with autograd.record():
            loss = cross_entropy(model(nd.array(inputs)), nd.array(inputs[:, :3].argmax(axis=1))).mean()
        loss.backward()
        trainer.step(1)
