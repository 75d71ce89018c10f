"""MXNet as the conformance tests use it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyhvd.parity.driver import BFLOAT16, Driver

__all__ = ["DRIVERS"]

Array = np.ndarray[Any, Any]


class _MXNet(Driver):
    gathers_wait = True
    mismatch_error = "mxnet.base.MXNetError"

    #: As MXNet spells it.
    _BFLOAT16 = np.dtype([("bfloat16", np.uint16)])

    def from_numpy(self, array: Array) -> Any:
        import mxnet as mx

        mx.util.set_np_shape(True)  # scalars and dimensions of 0 mean what they mean in NumPy
        if array.dtype == BFLOAT16:
            array = array.view(self._BFLOAT16)
        return mx.nd.array(array, dtype=array.dtype)

    def to_numpy(self, tensor: Any) -> Array:
        import mxnet as mx

        assert isinstance(tensor, mx.nd.NDArray), type(tensor)
        values: Array = tensor.asnumpy()
        return values.view(BFLOAT16) if values.dtype == self._BFLOAT16 else values

    def gradients(
        self, function: Callable[..., Sequence[Any]], arrays: Sequence[Array], weights: Sequence[Array]
    ) -> list[Array]:
        import mxnet as mx

        tensors, factors = [self.from_numpy(a) for a in arrays], [self.from_numpy(w) for w in weights]
        for tensor in tensors:
            tensor.attach_grad()
        with mx.autograd.record():
            results = function(*tensors)
            sums = [(r * w).sum().astype("float32") for r, w in zip(results, factors, strict=True)]
            loss = mx.nd.add_n(*sums)
        loss.backward()
        return [self.to_numpy(tensor.grad) for tensor in tensors]

    def forget_errors(self) -> None:
        import mxnet as mx

        with contextlib.suppress(mx.base.MXNetError):
            mx.nd.waitall()

    def unsupported(self) -> Sequence[Any]:
        import mxnet as mx

        return [mx.nd.ones((3, 4)).tostype("csr")]

    def argument_errors(self) -> tuple[type[BaseException], ...]:
        return (ValueError, self.error_type())


DRIVERS = (_MXNet,)
