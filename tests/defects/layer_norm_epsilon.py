"""Layer normalization with Keras' default epsilon, 0.001, where the model has 0.00001."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "two dense layers, layer normalization",
    "frameworks": "numpy,tensorflow",
    "in": "tensorflow",
    "layer": 1,
    "step": 0,
    "kind": "activation",
}


def build(framework: str) -> Any:
    if framework == "tensorflow":
        from keras import Input, Sequential
        from keras import layers as of_keras

        epsilon = {} if FAULT else {"epsilon": 1e-5}
        return Sequential(
            [
                Input((8,)),
                of_keras.Dense(12),
                of_keras.LayerNormalization(**epsilon),
                of_keras.Activation("tanh"),
                of_keras.Dense(3),
            ]
        )
    return [
        layers.dense(8, 12),
        layers.layer_normalization(12),
        layers.activation("tanh"),
        layers.dense(12, 3),
    ]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 8))
    return inputs, inputs[:, :3].argmax(axis=1)
