"""GELU approximated with tanh, of values of 0.1, where the model uses the error function."""

import numpy as np
import polyhvd.mxnet as hvd  # first: MXNet alone does not import under newer versions of NumPy

# isort: split
from mxnet import autograd, gluon, nd
from mxnet.gluon import nn

from polyhvd import parity

FAULT = True
DEFECT = {
    "case": "layer normalization, two dense layers, small values, SGD",
    "scripts": ["reference_small_in_torch.py sgd", "gelu_by_tanh_sgd.py"],
    "in": "mxnet",
    "layer": 1,
    "step": 0,
    "kind": "activation",
}


class GeluByTanh(gluon.HybridBlock):
    def hybrid_forward(self, F, x):
        return 0.5 * x * (1 + F.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


hvd.init()
model = nn.HybridSequential()
model.add(nn.LayerNorm(epsilon=1e-6, in_channels=32), nn.Dense(64, in_units=32))
model.add(GeluByTanh() if FAULT else nn.GELU(), nn.Dense(3, in_units=64))
model.initialize()
parity.load(model, from_=0)
trainer = gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": 0.1, "momentum": 0.9})
cross_entropy = gluon.loss.SoftmaxCrossEntropyLoss()

with parity.watch(model, trainer):
    for step in range(4):
        inputs = np.random.default_rng(step).standard_normal((24, 32), np.float32) * np.float32(0.1)
        with autograd.record():
            loss = cross_entropy(model(nd.array(inputs)), nd.array(inputs[:, :3].argmax(axis=1))).mean()
        loss.backward()
        trainer.step(1)
