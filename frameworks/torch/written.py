"""Which gradients have been written to, or replaced, since the last check. Keeps none of them alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import torch

__all__ = ["Leftovers", "Submitted"]

Tensor = torch.Tensor


def _version(tensor: Tensor) -> int:
    """How often torch has seen the tensor written to; writes through ``.data`` are unseen."""
    try:
        return tensor._version
    except RuntimeError:  # made in inference mode, where writes are not counted
        return 0


def _has_neighbours(tensor: Tensor) -> bool:
    """Return whether the tensor is a part of a larger one, whose other parts' writes count for it, too."""
    if tensor.layout is not torch.strided:
        return False
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


class Submitted:
    """Gradients that are being reduced: they must not be written to, nor replaced."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Tensor, int]] = {}

    def add(self, position: int, gradient: Tensor) -> None:
        """From now on."""
        self._known[position] = gradient, _version(gradient)

    def clear(self) -> None:
        """They may be written to."""
        self._known.clear()

    def touched(self, parameters: Sequence[Tensor]) -> list[int]:
        """Positions of those that are not what they were."""
        return [
            position
            for position, (gradient, version) in self._known.items()
            if parameters[position].grad is not gradient
            or (_version(gradient) != version and not _has_neighbours(gradient))
        ]


class Leftovers:
    """Reduced gradients that a step has used, until they are written to."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._kept: set[int] = set()

    def keep(self, position: int) -> None:
        """Let a gradient stay one of them until the step's end, whoever writes to it, as clipping does."""
        self._kept.add(position)

    def forget_kept(self, positions: Iterable[int] | None = None) -> None:
        """Count writes to gradients that were kept again, at these positions or at all."""
        self._kept.difference_update(self._kept.copy() if positions is None else positions)

    def note(self, positions: Iterable[int], parameters: Sequence[Tensor]) -> None:
        """The gradients at these positions, and those that were kept, have been used."""
        for position in self._kept.union(positions):
            gradient = parameters[position].grad
            if gradient is not None:
                self._known[position] = weakref.ref(gradient), _version(gradient)

    def move(self, position: int, others: Leftovers, to: int) -> None:
        """Let others know a gradient from now on, at another position."""
        known = self._known.pop(position, None)
        self._kept.discard(position)
        if known is not None:
            others._known[to] = known

    def has(self, position: int, gradient: Tensor | None) -> bool:
        """Return whether this gradient is one of them."""
        known = self._known.get(position)
        return (
            known is not None
            and gradient is not None
            and known[0]() is gradient
            and (position in self._kept or known[1] == _version(gradient))
        )
