"""The values of parameters, for comparisons between ranks."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from mxnet.gluon import Parameter

__all__ = ["DRIFT_REMEDY", "values_of"]

DRIFT_REMEDY = (
    "call hvd.broadcast_parameters(net.collect_params(), root_rank=0) before the first step; "
    "register_local_var(parameter) of the trainer excludes parameters that each rank keeps for itself"
)


def values_of(
    parameters: Iterable[Parameter], local: Container[int] = ()
) -> Iterator[tuple[str, Any] | None]:
    """Name and values of each parameter that is trained; None for others, and for those in ``local``."""
    for position, parameter in enumerate(parameters):
        if position in local or parameter.grad_req == "null" or parameter._data is None:
            yield None
        else:
            yield parameter.name, parameter.list_data()[0].asnumpy()
