"""How gradients of PyTorch travel: where they lie, and sparse ones as their nonzeros."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from polyhvd.torch.base import collectives
from polyhvd.torch.sparse import start_sparse_allreduce

from polyhvd.training.compression import Compressor
from polyhvd.training.reducer import Exchange, Results

__all__ = ["TorchExchange"]

Tensor = torch.Tensor


class TorchExchange(Exchange[Tensor]):
    """Exchanges gradients of parameters, by their positions.

    Args:
        parameters: the optimizer's; more may come. A sparse gradient is replaced, where it was reduced.
        kept: positions of those that keep the gradients that they have.
    """

    def __init__(self, parameters: list[Tensor], kept: set[Any]) -> None:
        super().__init__(collectives)
        self._parameters = parameters
        self._kept = kept

    def start_sparse(
        self,
        gradients: Mapping[Any, Tensor],
        prefix: str,
        compression: Compressor,
        priority: int,
        request: Mapping[str, Any],
    ) -> Results[Tensor]:
        """Begin to gather the nonzeros of all ranks; factors are not applied to them."""
        op, process_set = request["op"], request["process_set"]
        handles = [
            start_sparse_allreduce(
                gradient,
                name=f"{prefix}.{key}",
                op=op,
                process_set=process_set,
                compression=compression,
                priority=priority,
            )
            for key, gradient in gradients.items()
        ]
        return lambda: [collectives.synchronize(handle) for handle in handles]

    def is_sparse(self, gradient: Tensor) -> bool:
        """Return whether it is not dense."""
        return gradient.layout is not torch.strided

    def dense(self, gradient: Tensor) -> Tensor:
        """The gradient itself, or a dense copy of a sparse one."""
        return gradient if gradient.layout is torch.strided else gradient.to_dense()

    def transposed(self, tensor: Tensor, axes: Sequence[int]) -> Tensor:
        """A copy in separate memory: it is reduced there."""
        return tensor.permute(*axes).contiguous()

    def put(self, key: Any, gradient: Tensor, reduced: Tensor) -> Tensor:
        """Write a dense gradient in place; hand its parameter a sparse one, also what travelled as dense."""
        if gradient.layout is torch.strided and reduced.layout is torch.strided:
            return super().put(key, gradient, reduced)
        if reduced.layout is torch.strided:
            reduced = reduced.to_sparse(gradient.sparse_dim())
        if key not in self._kept:
            self._parameters[key].grad = reduced
        return reduced
