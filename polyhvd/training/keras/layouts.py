"""How the weights of Keras' layers lie, and where images or steps become rows. Imports no Keras."""

from __future__ import annotations

import math
from typing import Any

from polyhvd.training.layouts import Layout

__all__ = ["Rows", "is_a", "layout_of"]

_DEPTHWISE = ("BaseDepthwiseConv", "DepthwiseConv", "DepthwiseConv2D")
_SEPARABLE = ("BaseSeparableConv", "SeparableConv")
_CONVOLUTIONS = ("BaseConv", "Conv", "BaseConvTranspose", *_DEPTHWISE, *_SEPARABLE)
#: Behind these the last axis of a sequence is one of features in other frameworks, too.
_OF_FEATURES = ("Dense", "EinsumDense", "Embedding", "RNN", "Bidirectional", "MultiHeadAttention")


def is_a(layer: Any, *names: str) -> bool:
    """Whether a layer is of a class of one of these names, or of one that derives from it."""
    return any(cls.__name__ in names for cls in type(layer).__mro__)


class Rows:
    """Goes through the layers of a model, and knows which images or steps the next dense layer has as rows.

    Keras has channels last there, and the other frameworks have them first, so that its inputs are in another
    order: behind a Flatten, or a Reshape that makes rows, of what has height and width; and of steps with
    channels, if a convolution made these, and not an embedding or a recurrent layer.
    """

    def __init__(self) -> None:
        self._shape: tuple[int, ...] | None = None
        self._has_channels: bool | None = None  # what the last layers made; None: nothing is known of it

    def see(self, layer: Any) -> None:
        """A layer, before :meth:`of` is asked about its weights."""
        if _makes_rows(layer):
            self._shape = self._as_rows(layer)

    def of(self) -> tuple[int, ...] | None:
        """The shape, channels last, of what this layer has as rows; None: they are ordered as elsewhere."""
        return self._shape

    def leave(self, layer: Any) -> None:
        """The layer, after :meth:`of` was asked."""
        if is_a(layer, *_OF_FEATURES):
            self._shape, self._has_channels = None, False
        if is_a(layer, *_CONVOLUTIONS):
            self._has_channels = getattr(layer, "data_format", "channels_last") == "channels_last"

    def _as_rows(self, layer: Any) -> tuple[int, ...] | None:
        shape = _input_shape(layer)
        if shape is None or math.prod(shape[:-1]) <= 1:
            return None
        if len(shape) > 2:
            return shape
        made = _made_by_convolution(layer)
        return shape if (self._has_channels if made is None else made) else None


def _makes_rows(layer: Any) -> bool:
    if is_a(layer, "Flatten"):
        return bool(getattr(layer, "data_format", "channels_last") == "channels_last")
    return is_a(layer, "Reshape") and len(getattr(layer, "target_shape", ())) == 1


def _input_shape(layer: Any) -> tuple[int, ...] | None:
    """Of one sample; None: not known."""
    try:
        shape = tuple(layer.input.shape)
    except (AttributeError, ValueError):  # in a model that is a class of its own
        built = getattr(layer, "_build_shapes_dict", None) or {}
        shape = tuple(built.get("input_shape") or getattr(layer, "_build_input_shape", None) or ())
    return None if len(shape) < 2 or None in shape[1:] else shape[1:]


def _made_by_convolution(layer: Any) -> bool | None:
    """Whether what a layer is given was made by a convolution, or of features; None: not known."""
    waiting, seen = [layer], set[int]()
    while waiting:
        this = waiting.pop()
        if id(this) in seen:
            continue
        seen.add(id(this))
        if is_a(this, *_CONVOLUTIONS):
            return True
        if is_a(this, *_OF_FEATURES):
            return False
        try:
            given = this.input
        except (AttributeError, ValueError):
            return None
        for tensor in given if isinstance(given, (list, tuple)) else [given]:
            history = getattr(tensor, "_keras_history", None)
            before = getattr(history, "operation", getattr(history, "layer", None))
            if before is not None:
                waiting.append(before)
    return None


def layout_of(
    layer: Any, last: str, role: str, shape: tuple[int, ...], rows: tuple[int, ...] | None
) -> Layout:
    """How a weight lies.

    Args:
        layer: that has it.
        last: its name in the layer.
        role: what it is there.
        shape: as it lies.
        rows: what :meth:`Rows.of` says.
    """
    if role == "kernel" and (
        is_a(layer, *_DEPTHWISE) or (is_a(layer, *_SEPARABLE) and last == "depthwise_kernel")
    ):
        spatial = len(shape) - 2
        axes = (spatial, spatial + 1, *range(spatial))
        return Layout(shape, axes=axes, common=(shape[-2] * shape[-1], 1, *shape[:-2]))
    if role == "kernel" and is_a(layer, *_CONVOLUTIONS):
        spatial = len(shape) - 2
        return Layout(shape, axes=(spatial + 1, spatial, *range(spatial)))
    if role == "kernel" and is_a(layer, "Dense"):
        if rows and math.prod(rows) == shape[0]:
            rank = len(rows)
            axes = (rank, rank - 1, *range(rank - 1))
            return Layout(shape, view=(*rows, shape[1]), axes=axes, common=shape[::-1])
        return Layout(shape, axes=(1, 0))
    if is_a(layer, "EinsumDense"):
        return _of_einsum(layer, role, shape)
    if is_a(layer, "PReLU") and len(shape) > 1 and math.prod(shape[:-1]) == 1:  # shared over an image
        return Layout(shape, common=shape[-1:])
    if rows and shape == (math.prod(rows),):  # of a normalization between the two
        rank = len(rows)
        return Layout(shape, view=rows, axes=(rank - 1, *range(rank - 1)), common=shape)
    return Layout(shape)


def _of_einsum(layer: Any, role: str, shape: tuple[int, ...]) -> Layout:
    """Of a layer of attention: a dense one of others, whose units or inputs are heads times their size."""
    given, _, made = str(getattr(layer, "equation", "")).replace("...", "").partition("->")
    given, _, kernel = given.partition(",")
    units = [axis for axis, letter in enumerate(kernel) if letter in made]
    inputs = [axis for axis, letter in enumerate(kernel) if letter in given and letter not in made]
    if len(units) + len(inputs) != len(kernel) or any(kernel[axis] in given for axis in units):
        return Layout(shape)  # something else than a dense layer
    if role == "kernel" and len(shape) == len(kernel):
        counts = [math.prod(shape[axis] for axis in axes) for axes in (units, inputs)]
        return Layout(shape, axes=(*units, *inputs), common=(counts[0], counts[1]))
    if role == "bias" and len(shape) == len(units) > 1:
        return Layout(shape, common=(math.prod(shape),))
    return Layout(shape)
