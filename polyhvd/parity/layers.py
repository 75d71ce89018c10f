"""A network as plain values, of which each framework makes its own; what a case describes.

Shapes are those of PyTorch: images are [batch, channels, height, width], sequences [batch, time, units].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from polyhvd.errors import InvalidArgumentError

__all__ = [
    "ACTIVATIONS",
    "Layer",
    "activation",
    "attention",
    "batch_normalization",
    "convolution",
    "dense",
    "embedding",
    "flatten",
    "global_average_pool",
    "gru",
    "last",
    "layer_normalization",
    "lstm",
    "max_pool",
    "mean_over_time",
    "residual",
    "walk",
]

#: Functions that are the same in every framework: GELU is the exact one, not its approximation by tanh.
ACTIVATIONS = ("relu", "tanh", "sigmoid", "gelu")


@dataclass(frozen=True)
class Layer:
    """One layer, or a few with what leads around them.

    Args:
        kind: the name of the function that made it.
        options: by name.
        inner: layers within, in order.
        around: layers of the other path, around these.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    inner: tuple[Layer, ...] = ()
    around: tuple[Layer, ...] = ()


def walk(layers: Iterable[Layer]) -> Iterator[Layer]:
    """All layers, with those within them.

    Args:
        layers: of a case.
    """
    for layer in layers:
        yield layer
        yield from walk((*layer.inner, *layer.around))


def dense(inputs: int, units: int, *, bias: bool = True) -> Layer:
    """A dense layer over the last axis.

    Args:
        inputs, units: lengths of the last axis, before and after.
        bias: whether it has one.
    """
    return Layer("dense", {"inputs": inputs, "units": units, "bias": bias})


def convolution(
    inputs: int, units: int, kernel: int, *, stride: int = 1, padding: int = 0, bias: bool = True
) -> Layer:
    """A convolution of images with a square kernel.

    Args:
        inputs, units: channels, before and after.
        kernel: its height and width.
        stride: in both directions.
        padding: zeros at each of the four sides.
        bias: whether it has one.
    """
    return Layer(
        "convolution",
        {"inputs": inputs, "units": units, "kernel": kernel}
        | {"stride": stride, "padding": padding, "bias": bias},
    )


def batch_normalization(units: int, *, epsilon: float = 1e-5, keep: float = 0.9) -> Layer:
    """Batch normalization of images or rows; of the joined batch of all ranks where there are several.

    Args:
        units: channels.
        epsilon: is added to the variance.
        keep: what stays of the running statistics in each step: PyTorch's momentum is 1 less this.
    """
    return Layer("batch_normalization", {"units": units, "epsilon": epsilon, "keep": keep})


def layer_normalization(units: int, *, epsilon: float = 1e-5) -> Layer:
    """Layer normalization over the last axis.

    Args:
        units: its length.
        epsilon: is added to the variance.
    """
    return Layer("layer_normalization", {"units": units, "epsilon": epsilon})


def activation(function: str) -> Layer:
    """A function of each element.

    Args:
        function: one of :data:`ACTIVATIONS`.

    Raises:
        InvalidArgumentError: it is none of them.
    """
    if function not in ACTIVATIONS:
        raise InvalidArgumentError(f"activation({function!r}): expected one of {', '.join(ACTIVATIONS)}")
    return Layer("activation", {"function": function})


def max_pool(size: int) -> Layer:
    """The largest of each square of an image; rows and columns that do not fill one are dropped.

    Args:
        size: height and width of the square, and the stride.
    """
    return Layer("max_pool", {"size": size})


def global_average_pool() -> Layer:
    """The mean of each channel of an image: [batch, channels]."""
    return Layer("global_average_pool")


def flatten() -> Layer:
    """An image as a row, channels first."""
    return Layer("flatten")


def embedding(words: int, units: int, *, sparse: bool = False) -> Layer:
    """A row of a table for each whole number.

    Args:
        words: rows.
        units: columns.
        sparse: whether the gradient has only the rows that a batch has used, where the optimizer
            is SGD without momentum, decay, clipping and accumulation.
    """
    return Layer("embedding", {"words": words, "units": units, "sparse": sparse})


def lstm(inputs: int, units: int) -> Layer:
    """An LSTM over a sequence: all its states. One bias is trained, as Keras has no more.

    Args:
        inputs, units: of each step of the sequence, before and after.
    """
    return Layer("lstm", {"inputs": inputs, "units": units})


def gru(inputs: int, units: int) -> Layer:
    """A GRU over a sequence: all its states. The reset gate comes after the product, as in PyTorch.

    Args:
        inputs, units: of each step of the sequence, before and after.
    """
    return Layer("gru", {"inputs": inputs, "units": units})


def attention(units: int, heads: int) -> Layer:
    """Self-attention with several heads: four dense layers without bias, for query, key, value and output.

    Args:
        units: of each step of the sequence; a multiple of ``heads``.
        heads: how many.
    """
    return Layer(
        "attention",
        {"heads": heads},
        inner=tuple(dense(units, units, bias=False) for _ in range(4)),
    )


def residual(layers: Sequence[Layer], around: Sequence[Layer] = ()) -> Layer:
    """The sum of what some layers make and of what others make of the same.

    Args:
        layers: in order.
        around: of the other path; empty: the input itself.
    """
    return Layer("residual", inner=tuple(layers), around=tuple(around))


def last() -> Layer:
    """The last step of a sequence."""
    return Layer("last")


def mean_over_time() -> Layer:
    """The mean of all steps of a sequence."""
    return Layer("mean_over_time")
