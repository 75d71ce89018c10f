"""How the weights of Keras' layers lie, and where images or steps become rows. Imports no Keras."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from polyhvd.training.keras.orders import (
    CONVOLUTIONS,
    DEPTHWISE,
    SAME,
    SEPARABLE,
    Order,
    Shape,
    is_a,
    rows_of,
)
from polyhvd.training.layouts import Layout

__all__ = ["Rows", "built_shape", "layout_of", "places_of", "unfollowed"]

#: Behind these the last axis of a sequence is one of features in other frameworks, too.
_OF_FEATURES = ("Dense", "EinsumDense", "Embedding", "RNN", "Bidirectional", "MultiHeadAttention")


class Rows:
    """Goes through the layers of a subclassed model, which is not a graph, in the order in which they
    were made, and guesses from the numbers of inputs which images or steps a dense layer has as rows.

    These are in another order than elsewhere behind a Flatten, or a Reshape that makes rows, of what has
    height and width; and of steps with channels, if a convolution made these, and not an embedding or a
    recurrent layer.
    """

    def __init__(self) -> None:
        self._shapes: dict[int, Shape] = {}  # of images that were flattened, by how many numbers they have
        self._has_channels: bool | None = None  # what the last layers made; None: nothing is known of it

    def see(self, layer: Any) -> None:
        """A layer, before :meth:`of` is asked about its weights."""
        shape = _input_shape(layer) if _makes_rows(layer) else None
        if shape is not None and (len(shape) > 2 or self._has_channels):
            self._shapes[math.prod(shape)] = shape

    def of(self, inputs: int) -> Order:
        """The order of what a layer with so many inputs is given."""
        shape = self._shapes.get(inputs)
        return SAME if shape is None else rows_of(shape)

    def leave(self, layer: Any) -> None:
        """The layer, after :meth:`of` was asked."""
        if is_a(layer, *_OF_FEATURES):
            self._has_channels = False
            self._shapes.pop(getattr(layer, "units", 0), None)
        if is_a(layer, *CONVOLUTIONS):
            self._has_channels = getattr(layer, "data_format", "channels_last") == "channels_last"


def _makes_rows(layer: Any) -> bool:
    if is_a(layer, "Flatten"):
        return bool(getattr(layer, "data_format", "channels_last") == "channels_last")
    return is_a(layer, "Reshape") and len(getattr(layer, "target_shape", ())) == 1


def _input_shape(layer: Any) -> tuple[int, ...] | None:
    """Return the shape of one sample; None: not known."""
    try:
        shape = tuple(layer.input.shape)
    except (AttributeError, ValueError):  # in a subclassed model
        shape = built_shape(layer) or ()
    return None if len(shape) < 2 or None in shape[1:] else shape[1:]


def built_shape(layer: Any) -> tuple[int, ...] | None:
    """The shape of the one input that a layer was built with; None: it is not known, or of several."""
    shapes = getattr(layer, "_build_shapes_dict", None) or {}
    shape = tuple(shapes.get("input_shape") or getattr(layer, "_build_input_shape", None) or ())
    return shape if shape and all(isinstance(each, int) for each in shape[1:]) else None


def unfollowed(layer: Any, role: str, shape: Shape, order: Order) -> str:
    """The layer behind which the order of a weight's inputs is not known; empty: it is known.

    Args:
        layer: that has the weight.
        role: what it is there.
        shape: as it lies.
        order: of what the layer is given.
    """
    if role in ("bias", "state kernel", "table") or not shape or order.kind not in ("rows", "unknown"):
        return ""
    if order.kind == "unknown":
        return order.by
    if is_a(layer, "EinsumDense") or (role == "kernel" and is_a(layer, *CONVOLUTIONS)):
        return f"{type(layer).__name__} {layer.name!r}"
    return ""


def layout_of(
    layer: Any, last: str, role: str, shape: Shape, order: Order, units: Shape | None = None
) -> Layout:
    """How a weight lies.

    Args:
        layer: that has it.
        last: its name in the layer.
        role: what it is there.
        shape: as it lies.
        order: of what the layer is given.
        units: the image, channels last, that a later layer makes of the units of a dense layer.
    """
    if role == "kernel" and (
        is_a(layer, *DEPTHWISE) or (is_a(layer, *SEPARABLE) and last == "depthwise_kernel")
    ):
        spatial = len(shape) - 2
        axes = (spatial, spatial + 1, *range(spatial))
        return Layout(shape, axes=axes, common=(shape[-2] * shape[-1], 1, *shape[:-2]))
    if role == "kernel" and is_a(layer, *CONVOLUTIONS):
        spatial = len(shape) - 2
        return Layout(shape, axes=(spatial + 1, spatial, *range(spatial)))
    if is_a(layer, "Dense"):
        return _of_dense(role, shape, order, units)
    if is_a(layer, "EinsumDense"):
        return _of_einsum(layer, role, shape)
    if is_a(layer, "PReLU") and len(shape) > 1 and math.prod(shape[:-1]) == 1:  # shared over an image
        return Layout(shape, common=shape[-1:])
    if len(shape) == 1 and (places := places_of(order, shape[0])) is not None:  # of a normalization of rows
        if len(order.parts) == 1:
            image = order.parts[0]
            return Layout(shape, view=image, axes=_channels_first(image), common=shape)
        return Layout(shape, order=places)
    if len(shape) > 1 and order.kind == "image" and is_a(layer, "LayerNormalization", "PReLU"):
        return Layout(shape, axes=_channels_first(shape))
    return Layout(shape)


def places_of(order: Order, inputs: int) -> tuple[int, ...] | None:
    """Which places rows have in Keras, in the order of other frameworks; None: there are no such rows.

    Args:
        order: of what a layer is given.
        inputs: how many numbers a row has.
    """
    if order.kind != "rows" or sum(map(math.prod, order.parts)) != inputs:
        return None
    found: list[int] = []
    for part in order.parts:
        places = np.arange(len(found), len(found) + math.prod(part)).reshape(part)
        found += np.moveaxis(places, -1, 0).ravel().tolist()
    return tuple(found)


def _channels_first(image: Shape, begin: int = 0) -> tuple[int, ...]:
    rank = len(image)
    return tuple(begin + axis for axis in (rank - 1, *range(rank - 1)))


def _of_dense(role: str, shape: Shape, order: Order, units: Shape | None) -> Layout:
    if units is not None and math.prod(units) != shape[-1]:
        units = None
    if role == "bias":
        if units is None:
            return Layout(shape)
        return Layout(shape, view=units, axes=_channels_first(units), common=shape)
    if role != "kernel" or len(shape) != 2:
        return Layout(shape)
    places = places_of(order, shape[0])
    if places is None and units is None:
        return Layout(shape, axes=(1, 0))
    is_one = places is not None and len(order.parts) == 1
    given = order.parts[0] if is_one else shape[:1]
    made = units or shape[1:]
    axes = (*_channels_first(made, len(given)), *_channels_first(given))
    return Layout(
        shape,
        view=(*given, *made),
        axes=axes,
        common=shape[::-1],
        order=None if is_one else places,
    )


def _of_einsum(layer: Any, role: str, shape: tuple[int, ...]) -> Layout:
    """Return the layout of a dense layer of attention: its units or inputs are heads times their size."""
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
