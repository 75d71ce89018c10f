"""Gradients of several backward passes, added up on this rank until they are reduced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mxnet as mx
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from polyhvd.training import passes
from polyhvd.training.options import Options

__all__ = ["Passes", "Sums", "fill", "scale"]


def scale(gradient: NDArray, factor: float) -> None:
    """Multiply in place, a row_sparse array too."""
    if factor == 1.0:
        return
    if isinstance(gradient, mx.np.ndarray):
        gradient *= factor
    else:
        mx.nd._internal._mul_scalar(gradient, factor, out=gradient)


def fill(gradient: NDArray, value: float) -> None:
    """Overwrite every element, or every row; of a row_sparse array with zero: have no rows."""
    gradient[() if isinstance(gradient, mx.np.ndarray) else slice(None)] = value


class Sums:
    """Gradients that wait for the last pass, by key, in separate buffers."""

    def __init__(self) -> None:
        self._sums: dict[Any, NDArray] = {}

    def add(self, key: Any, gradient: NDArray) -> None:
        """Keep what this pass has made; ``gradient`` may be overwritten afterwards."""
        if key not in self._sums:
            self._sums[key] = gradient.copy()
        elif gradient.stype == "default":
            self._sums[key] += gradient
        else:
            self._sums[key] = mx.nd.sparse.add(self._sums[key], gradient)

    def pour(self, key: Any, gradient: NDArray, *, is_fresh: bool = True) -> bool:
        """Write the sum of all passes into ``gradient``, which is of the last one if ``is_fresh``.

        Returns:
            whether any pass has made a gradient.
        """
        total = self._sums.pop(key, None)
        if total is None:
            return is_fresh
        if not is_fresh:
            total.copyto(gradient)
        elif gradient.stype == "default":
            gradient += total
        else:
            mx.nd.sparse.add(gradient, total).copyto(gradient)
        return True


class Passes:
    """The backward passes of a trainer's step.

    Gradients of ``grad_req='write'`` are added up in separate buffers, those of ``'add'`` by MXNet
    where they are.

    Args:
        options: of the trainer.
    """

    def __init__(self, options: Options) -> None:
        self._number = options.backward_passes_per_step
        self._factor = options.passes_factor
        self._count = 0
        self._sums = Sums()

        passes.register(self)

    def passes_held(self) -> int:
        """See :class:`polyhvd.training.passes.CountedPasses`."""
        return self._number if self._count else 0

    def drop_passes(self) -> None:
        """Forget the passes since the last step."""
        self._count = 0
        self._sums = Sums()

    def end(self, parameters: Mapping[int, Parameter]) -> bool:
        """Note the end of a pass; whether it was the step's last, and gradients are those of all.

        A parameter that only an earlier pass has used counts as used: its gradient is not stale.
        """
        self._count += 1
        is_last = self._count == self._number
        if self._number == 1:
            self._count = 0
            return True
        for position, parameter in parameters.items():
            (gradient, *_), (data, *_) = parameter.list_grad(), parameter.list_data()
            is_fresh = bool(data._fresh_grad)
            if is_last:
                if self._sums.pour(position, gradient, is_fresh=is_fresh):
                    data._fresh_grad = True
                    scale(gradient, self._factor)
            elif is_fresh and parameter.grad_req == "write":
                self._sums.add(position, gradient)
                data._fresh_grad = False
        if is_last:
            self._count = 0
        return is_last
