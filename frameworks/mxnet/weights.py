"""The values of parameters and hyperparameters, for comparisons between ranks."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from mxnet.gluon import Parameter

from polyhvd.training.drift import Hyperparameters

__all__ = ["DRIFT_REMEDY", "hyperparameters_of", "values_of"]

DRIFT_REMEDY = (
    "call hvd.broadcast_parameters(net.collect_params(), root_rank=0) before the first step; "
    "register_local_var(parameter) of the trainer excludes parameters that each rank keeps for itself"
)

#: Attributes of optimizers, and what reports call them.
_NAMES = {
    "learning_rate": "learning rate",
    "momentum": "momentum",
    "wd": "weight decay",
    "beta1": "beta 1",
    "beta2": "beta 2",
    "epsilon": "epsilon",
}


def hyperparameters_of(optimizer: Any, weights: Iterable[tuple[str, Any] | None]) -> Hyperparameters:
    """The hyperparameters of an optimizer with which ranks train weights; empty if they share none."""
    first = next(((i, weight[0]) for i, weight in enumerate(weights) if weight is not None), None)
    if first is None:
        return {}
    found = {name: getattr(optimizer, attribute, None) for attribute, name in _NAMES.items()}
    values = {name: float(value) for name, value in found.items() if isinstance(value, (float, int))}
    return {first[0]: (first[1], values)}


def values_of(
    parameters: Iterable[Parameter], local: Container[int] = ()
) -> Iterator[tuple[str, Any] | None]:
    """Name and values of each parameter, None for one that is frozen; None in place of those in ``local``."""
    for position, parameter in enumerate(parameters):
        if position in local or parameter._data is None:
            yield None
        elif parameter.grad_req == "null":
            yield parameter.name, None
        else:
            yield parameter.name, parameter.list_data()[0].asnumpy()
