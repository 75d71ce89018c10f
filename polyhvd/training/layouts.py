"""How a framework lays out a weight, and the common form for exchange. Imports no framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

__all__ = ["Layout"]

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """The conversion of a weight from its framework's form to the common form, and back.

    The tensor is reshaped to ``view``, its axes are permuted, the result is reshaped to ``common``, numbers
    along its last axis change places, and so do blocks of its first axis. The common form is that of PyTorch
    and Gluon: OIHW for convolutions, [units, inputs] for dense layers, and
    channels before height and width where an image was flattened.

    Args:
        shape: as the weight lies.
        view: of the same number of elements; None: as it lies.
        axes: of the view, in the order in which the common form has them; None: as they are.
        common: the shape in common; None: that of the permuted view.
        blocks: of as many equal parts of the first axis, such as the gates of a cell, which one of these the
            common form has in each place; None: none change places.
        order: of the last axis, which place before this step the common form has in each place; None: none
            change places.

    Example::

        kernel = Layout((3, 3, 16, 32), axes=(3, 2, 0, 1))  # of a convolution of Keras, HWIO
        assert kernel.common_shape == (32, 16, 3, 3)
    """

    shape: tuple[int, ...]
    view: tuple[int, ...] | None = None
    axes: tuple[int, ...] | None = None
    common: tuple[int, ...] | None = None
    blocks: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        viewed = self.viewed_shape
        axes = self.axes
        if axes is not None and sorted(axes) != list(range(len(viewed))):
            raise ValueError(f"axes={axes} are not a permutation of the {len(viewed)} axes of {viewed}")
        for other in (viewed, self.common_shape):
            if math.prod(other) != math.prod(self.shape):
                raise ValueError(f"a weight of shape {self.shape} cannot be seen as {other}")
        if self.order is not None and sorted(self.order) != list(range(self.common_shape[-1])):
            raise ValueError(f"order is not a permutation of the last axis of {self.common_shape}")

    @property
    def viewed_shape(self) -> tuple[int, ...]:
        """Before axes are permuted."""
        return self.shape if self.view is None else self.view

    @property
    def permuted_shape(self) -> tuple[int, ...]:
        """After axes were permuted."""
        viewed = self.viewed_shape
        return viewed if self.axes is None else tuple(viewed[axis] for axis in self.axes)

    @property
    def common_shape(self) -> tuple[int, ...]:
        """The shape of the weight in common form."""
        return self.permuted_shape if self.common is None else self.common

    @property
    def is_common(self) -> bool:
        """Whether the weight lies in common form."""
        return (
            self.axes is None
            and self.blocks is None
            and self.order is None
            and self.common_shape == self.shape
        )

    def to_common(
        self,
        tensor: T,
        transpose: Callable[[T, Sequence[int]], T],
        reshape: Callable[[T, Sequence[int]], T],
        take: Callable[[T, Sequence[int]], T],
    ) -> T:
        """A tensor that is laid out as the weight, in common form but for its blocks.

        Args:
            tensor: of :attr:`shape`.
            transpose: of its framework; given the tensor and the axes.
            reshape: likewise; given the tensor and the new shape.
            take: likewise; given the tensor and places of the last axis.
        """
        if self.view is not None:
            tensor = reshape(tensor, self.view)
        if self.axes is not None:
            tensor = transpose(tensor, self.axes)
        if self.common is not None:
            tensor = reshape(tensor, self.common)
        return tensor if self.order is None else take(tensor, self.order)

    def from_common(
        self,
        tensor: T,
        transpose: Callable[[T, Sequence[int]], T],
        reshape: Callable[[T, Sequence[int]], T],
        take: Callable[[T, Sequence[int]], T],
    ) -> T:
        """The inverse of :meth:`to_common`."""
        if self.order is not None:
            tensor = take(tensor, np.argsort(self.order).tolist())
        if self.common is not None:
            tensor = reshape(tensor, self.permuted_shape)
        if self.axes is not None:
            tensor = transpose(tensor, [self.axes.index(axis) for axis in range(len(self.axes))])
        return tensor if self.view is None else reshape(tensor, self.shape)

    def array_to_common(self, array: Any) -> Any:
        """:meth:`to_common` of a NumPy array, with its blocks."""
        whole = self.to_common(array, _transpose, _reshape, _take)
        return whole if self.blocks is None else _with_blocks(whole, self.blocks)

    def array_from_common(self, array: Any) -> Any:
        """The inverse of :meth:`array_to_common`."""
        if self.blocks is not None:
            array = _with_blocks(array, [self.blocks.index(block) for block in range(len(self.blocks))])
        return self.from_common(array, _transpose, _reshape, _take)


def _transpose(array: Any, axes: Sequence[int]) -> Any:
    return array.transpose(axes)


def _with_blocks(array: Any, order: Sequence[int]) -> Any:
    parts = array.reshape(len(order), -1, *array.shape[1:])
    return parts[list(order)].reshape(array.shape)


def _reshape(array: Any, shape: Sequence[int]) -> Any:
    return array.reshape(shape)


def _take(array: Any, places: Sequence[int]) -> Any:
    return array[..., list(places)]
