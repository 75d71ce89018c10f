"""GELU approximated with tanh, of values of 0.1, trained with AdamW."""

import keras
import numpy as np
import polyhvd.keras as hvd

from polyhvd import parity

FAULT = True
DEFECT = {
    "case": "layer normalization, two dense layers, small values, AdamW",
    "scripts": ["reference_small_in_torch.py adamw", "gelu_by_tanh_adamw.py"],
    "in": "tensorflow",
    "layer": 1,
    "step": 0,
    "kind": "activation",
}

hvd.init()
model = keras.Sequential(
    [
        keras.Input((32,)),
        keras.layers.LayerNormalization(epsilon=1e-6),
        keras.layers.Dense(64, activation=lambda x: keras.activations.gelu(x, approximate=FAULT)),
        keras.layers.Dense(3),
    ]
)
optimizer = keras.optimizers.AdamW(1e-3, weight_decay=0.01, epsilon=1e-8)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, run_eagerly=True)
parity.load(model, from_=0)

with parity.watch(model, optimizer):
    for step in range(4):
        inputs = np.random.default_rng(step).standard_normal((24, 32), np.float32) * np.float32(0.1)
        model.train_on_batch(inputs, inputs[:, :3].argmax(axis=1))
