"""PyTorch as the conformance tests use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyhvd.parity.driver import BFLOAT16, Driver

__all__ = ["DRIVERS"]

Array = np.ndarray[Any, Any]


class _Torch(Driver):
    def from_numpy(self, array: Array) -> Any:
        import torch

        if array.dtype == BFLOAT16:
            return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
        return torch.from_numpy(array.copy())

    def to_numpy(self, tensor: Any) -> Array:
        import torch

        assert isinstance(tensor, torch.Tensor), type(tensor)
        tensor = tensor.detach()
        if tensor.dtype == torch.bfloat16:
            bits: Array = tensor.contiguous().view(torch.int16).numpy()
            return bits.view(BFLOAT16)
        values: Array = tensor.numpy()
        return values

    def transposed(self, tensor: Any) -> Any:
        return tensor.permute(*reversed(range(tensor.dim())))

    def gradients(
        self, function: Callable[..., Sequence[Any]], arrays: Sequence[Array], weights: Sequence[Array]
    ) -> list[Array]:
        tensors = [self.from_numpy(array).requires_grad_() for array in arrays]
        results = self.call(function, *tensors)
        sums = [(r * self.from_numpy(w)).sum() for r, w in zip(results, weights, strict=True)]
        sum(sums).backward()
        return [self.to_numpy(tensor.grad) for tensor in tensors]

    def parameter(self, array: Array) -> Any:
        import torch

        return torch.nn.Parameter(self.from_numpy(array))

    def unsupported(self) -> Sequence[Any]:
        import torch

        return [torch.ones(4, dtype=torch.complex64), torch.ones(4).to_sparse()]


DRIVERS = (_Torch,)
