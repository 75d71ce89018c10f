"""Included cases: networks that train in seconds, with the layers in which frameworks differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from polyhvd.parity import layers
from polyhvd.parity.case import Case, Optimizer
from polyhvd.parity.layers import Layer

__all__ = ["CASES"]

Array = np.ndarray[Any, Any]
_BATCH = 24
_CLASSES = 5
_WORDS, _STEPS = 20, 6


def _rng(step: int) -> np.random.Generator:
    return np.random.default_rng([2027, step])


def _classes(features: Array) -> Array:
    """Which of the first features is the largest: something that a network can learn."""
    chosen: Array = features.reshape(len(features), -1)[:, :_CLASSES].argmax(axis=1)
    return chosen


def _rows(_: str, step: int) -> tuple[Array, Array]:
    inputs = _rng(step).standard_normal((_BATCH, 16), np.float32)
    return inputs, _classes(inputs)


def _points(_: str, step: int) -> tuple[Array, Array]:
    inputs = _rng(step).standard_normal((_BATCH, 16), np.float32)
    return inputs, (inputs[:, :3] * 2.0 + inputs[:, 3:6]).astype(np.float32)


def _images(size: int, batch: int = _BATCH) -> Any:
    def batch_of(_: str, step: int) -> tuple[Array, Array]:
        inputs = _rng(step).standard_normal((batch, 3, size, size), np.float32)
        return inputs, _classes(inputs)

    return batch_of


def _sequences(_: str, step: int) -> tuple[Array, Array]:
    inputs = _rng(step).standard_normal((_BATCH, _STEPS, 8), np.float32)
    return inputs, _classes(inputs[:, -1])


def _words(_: str, step: int) -> tuple[Array, Array]:
    inputs = _rng(step).integers(0, _WORDS, (_BATCH, _STEPS))
    return inputs, inputs[:, -1] % _CLASSES


def _cnn(_: str) -> list[Layer]:
    return [
        layers.convolution(3, 8, 3, stride=2, padding=1, bias=False),
        layers.batch_normalization(8),
        layers.activation("gelu"),
        layers.convolution(8, 4, 3, padding=1, bias=False),
        layers.batch_normalization(4),
        layers.activation("tanh"),
        layers.max_pool(2),
        layers.flatten(),
        layers.dense(16, _CLASSES),
    ]


def _transformer(_: str) -> list[Layer]:
    return [
        layers.embedding(_WORDS, 16),
        layers.residual([layers.layer_normalization(16), layers.attention(16, 4)]),
        layers.residual(
            [
                layers.layer_normalization(16),
                layers.dense(16, 32),
                layers.activation("gelu"),
                layers.dense(32, 16),
            ]
        ),
        layers.layer_normalization(16),
        layers.mean_over_time(),
        layers.dense(16, _CLASSES),
    ]


def _block(inputs: int, units: int, stride: int) -> list[Layer]:
    """A basic block of a ResNet (He, Zhang, Ren and Sun, CVPR 2016)."""
    around = []
    if stride != 1 or inputs != units:
        around = [
            layers.convolution(inputs, units, 1, stride=stride, bias=False),
            layers.batch_normalization(units),
        ]
    inner = [
        layers.convolution(inputs, units, 3, stride=stride, padding=1, bias=False),
        layers.batch_normalization(units),
        layers.activation("gelu"),
        layers.convolution(units, units, 3, padding=1, bias=False),
        layers.batch_normalization(units),
    ]
    return [layers.residual(inner, around), layers.activation("gelu")]


def _resnet18(_: str) -> list[Layer]:
    """Return a ResNet-18 with a stem for small images, an eighth of the channels, and GELU instead of ReLU.

    Inputs of some of a million ReLUs in a step are so close to 0 that rounding decides their sign.
    """
    widths = (8, 16, 32, 64)
    made = [
        layers.convolution(3, widths[0], 3, padding=1, bias=False),
        layers.batch_normalization(widths[0]),
        layers.activation("gelu"),
    ]
    before = widths[0]
    for number, units in enumerate(widths):
        made += _block(before, units, 1 if number == 0 else 2) + _block(units, units, 1)
        before = units
    return [*made, layers.global_average_pool(), layers.dense(before, _CLASSES)]


def _cell(kind: Any) -> Any:
    return lambda _: [kind(8, 12), layers.last(), layers.dense(12, _CLASSES)]


#: By name.
CASES: dict[str, Case] = {
    case.name: case
    for case in (
        Case(
            "linear",
            lambda _: [layers.dense(16, 3)],
            _points,
            loss="squared_error",
            about="one dense layer, squared error",
        ),
        Case(
            "mlp",
            lambda _: [
                layers.dense(16, 32),
                layers.activation("relu"),
                layers.dense(32, 32),
                layers.activation("tanh"),
                layers.dense(32, _CLASSES),
            ],
            _rows,
            about="three dense layers",
        ),
        Case(
            "cnn",
            _cnn,
            _images(8),
            about="two convolutions, batch normalization, GELU, tanh, max pooling, dense",
        ),
        Case("lstm", _cell(layers.lstm), _sequences, about="an LSTM over short sequences"),
        Case("gru", _cell(layers.gru), _sequences, about="a GRU over short sequences"),
        Case("transformer", _transformer, _words, about="an embedding and one Transformer block"),
        Case(
            "embedding",
            lambda _: [
                layers.embedding(_WORDS, 12, sparse=True),
                layers.mean_over_time(),
                layers.dense(12, _CLASSES),
            ],
            _words,
            about="an embedding with sparse gradients; SGD",
        ),
        Case(
            "resnet18",
            _resnet18,
            _images(8, 24),
            optimizer=Optimizer("momentum", rate=0.001),
            about="ResNet-18 with an eighth of the channels and GELU, on images of 8 x 8",
        ),
    )
}
