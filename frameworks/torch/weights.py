"""The values of an optimizer's parameters, for comparisons between ranks."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch

__all__ = ["DRIFT_REMEDY", "values_of"]

Tensor = torch.Tensor
DRIFT_REMEDY = (
    "call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step; "
    "register_local_var(parameter) of the optimizer excludes parameters that each rank keeps for itself"
)


def values_of(
    names: Sequence[str], parameters: Sequence[Tensor], local: Container[int]
) -> Iterator[tuple[str, Any] | None]:
    """Name and bytes of each parameter; None for one that is frozen, sparse, without data, or a rank's own.

    Args:
        names: of the parameters.
        parameters: of the optimizer.
        local: positions of those that each rank keeps for itself.
    """
    for position, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        is_dense = parameter.layout is torch.strided and not parameter.is_meta
        if position in local or not parameter.requires_grad or not is_dense:
            yield None
        else:
            yield name, parameter.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
