"""A convolution with stride 2 and Keras' padding "same", which is none on the left and one on the right."""

from typing import Any

import numpy as np

from polyhvd.parity import layers

FAULT = True
DEFECT = {
    "case": "convolution with stride, dense",
    "frameworks": "numpy,tensorflow",
    "in": "tensorflow",
    "layer": 0,
    "step": 0,
    "kind": "activation",
}


def build(framework: str) -> Any:
    if framework == "tensorflow":
        from keras import Input, Sequential
        from keras import layers as of_keras

        padding = [] if FAULT else [of_keras.ZeroPadding2D(1)]
        return Sequential(
            [
                Input((8, 8, 3)),
                *padding,
                of_keras.Conv2D(6, 3, strides=2, padding="same" if FAULT else "valid"),
                of_keras.Activation("tanh"),
                of_keras.GlobalAveragePooling2D(),
                of_keras.Dense(3),
            ]
        )
    return [
        layers.convolution(3, 6, 3, stride=2, padding=1),
        layers.activation("tanh"),
        layers.global_average_pool(),
        layers.dense(6, 3),
    ]


def batch(framework: str, step: int) -> tuple[np.ndarray, np.ndarray]:
    inputs = np.random.default_rng(step).standard_normal((12, 3, 8, 8))
    return inputs, inputs[:, :, 2, 2].argmax(axis=1)
