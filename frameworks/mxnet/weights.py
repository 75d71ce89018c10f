"""The values of parameters and hyperparameters, for comparisons between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from mxnet.gluon import Parameter
from mxnet.ndarray import NDArray

from polyhvd import _core
from polyhvd.training.drift import Hyperparameters

__all__ = ["DRIFT_REMEDY", "checksums_of_states", "hyperparameters_of", "values_of"]

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


def checksums_of_states(states: Mapping[Any, Any]) -> dict[Any, int]:
    """Checksums of an optimizer's states, by the keys of an updater's ``states``; none for an empty state."""
    found = {}
    for key, state in states.items():
        arrays = list(_arrays_in(state))
        if arrays:
            found[key] = zlib.crc32(b"".join(np.uint32(_core.crc32c(array)).tobytes() for array in arrays))
    return found


def _arrays_in(state: Any) -> Iterator[np.ndarray[Any, Any]]:
    if isinstance(state, (tuple, list)):
        for each in state:
            yield from _arrays_in(each)
    elif isinstance(state, NDArray):
        yield np.ascontiguousarray(state.asnumpy()).reshape(-1).view(np.uint8)
