"""Layouts that are named by letters, such as NHWC."""

from __future__ import annotations

from polyhvd.errors import InvalidArgumentError
from polyhvd.training.layouts import Layout

__all__ = ["layout_of"]

#: Batch, units and channels come before depth, height and width; of weights outputs before inputs.
_COMMON = ("TNCDHW", "OIDHW")


def layout_of(layout: Layout | str | None, shape: tuple[int, ...]) -> Layout:
    """How a tensor of this shape lies.

    Args:
        layout: a :class:`Layout`; or a letter for each axis, of activations N, C, D, H, W (and T for time),
            of weights O, I, D, H, W; None: in common form.
        shape: of the tensor.

    Raises:
        InvalidArgumentError: it does not fit the shape.
    """
    if layout is None:
        return Layout(shape)
    if isinstance(layout, Layout):
        if layout.shape != shape:
            raise InvalidArgumentError(
                f"layout: it is for a tensor of shape {list(layout.shape)}, found {list(shape)}"
            )
        return layout
    if not isinstance(layout, str):
        raise InvalidArgumentError(
            f"layout: expected a Layout or letters such as 'NHWC', found {type(layout).__name__}"
        )
    for order in _COMMON:
        if set(layout) <= set(order) and len(set(layout)) == len(layout):
            if len(layout) != len(shape):
                raise InvalidArgumentError(
                    f"layout={layout!r} has {len(layout)} axes, and the tensor is {list(shape)}"
                )
            return Layout(shape, axes=tuple(layout.index(letter) for letter in order if letter in layout))
    raise InvalidArgumentError(
        f"layout={layout!r}: expected each axis once, of activations N, T, C, D, H and W, or of weights "
        "O, I, D, H and W"
    )
