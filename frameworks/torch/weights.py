"""The values of an optimizer's parameters and hyperparameters, for comparisons between ranks."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from polyhvd import _core
from polyhvd.training.drift import Hyperparameters

__all__ = ["DRIFT_REMEDY", "UsedValues", "checksums_of_states", "values_of"]

Tensor = torch.Tensor
DRIFT_REMEDY = (
    "call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step; "
    "register_local_var(parameter) of the optimizer excludes parameters that each rank keeps for itself"
)

#: Hyperparameters in a group of parameters, and what reports call them; "betas" are two numbers.
_NAMES = {
    "lr": "learning rate",
    "momentum": "momentum",
    "weight_decay": "weight decay",
    "dampening": "dampening",
    "alpha": "alpha",
    "eps": "epsilon",
}
_KEYS = (*_NAMES, "betas")


class UsedValues:
    """The hyperparameters with which an optimizer has taken its last step.

    Those of the next step are not comparable: programs set them before or after ``backward()``, and a rank
    without a batch calls only ``step()``.
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Any, ...]] = []  # in each group, unless tensors are among them
        self._values: list[dict[str, float]] = []  # of each group
        self._sizes: list[int] = []  # of the groups
        self._digest = 0
        self._kept: list[dict[str, float]] | None = None

    def note(self, groups: Sequence[Mapping[str, Any]], local: Set[int]) -> int:
        """Keep the values of a step; return a digest that is the same on ranks with the same values.

        Args:
            groups: of the optimizer.
            local: positions of parameters that each rank keeps for itself.
        """
        seen = [tuple(map(group.get, _KEYS)) for group in groups]
        if seen == self._seen:
            return self._digest
        self._seen = [] if any(isinstance(value, Tensor) for some in seen for value in some) else seen
        values = [_values_in(group) for group in groups]
        if values != self._values:
            self._values, self._sizes = values, [len(group["params"]) for group in groups]
            shared = [
                number
                for at, size, by_name in self._groups(values)
                if not local or not local >= set(range(at, at + size))
                for number in by_name.values()
            ]
            # Hosts may round a schedule differently.
            self._digest = zlib.crc32(np.array(shared, dtype=np.float32).tobytes()) & 0xFFFF or 1
        return self._digest

    def keep(self) -> bool:
        """Keep the values of the last step for :meth:`by_position`; return False if that was done before."""
        if self._kept is not None:
            return False
        self._kept = self._values
        return True

    def by_position(self, names: Sequence[str], compared: Container[int]) -> Hyperparameters:
        """The values that were kept.

        Args:
            names: of the parameters.
            compared: positions of those that the ranks share.
        """
        found: dict[int, tuple[str, Mapping[str, float]]] = {}
        for at, size, values in self._groups(self._kept or []):
            first = next((position for position in range(at, at + size) if position in compared), None)
            if first is not None:
                found[first] = names[first], values
        return found

    def _groups(self, values: Sequence[dict[str, float]]) -> Iterator[tuple[int, int, dict[str, float]]]:
        """Position of the first parameter of each group, their number, and the values."""
        begin = 0
        for size, by_name in zip(self._sizes, values, strict=False):
            yield begin, size, by_name
            begin += size


def _values_in(group: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, name in _NAMES.items():
        value = group.get(key)
        if isinstance(value, (float, int)):
            found[name] = value
        elif isinstance(value, Tensor) and value.is_cpu and value.numel() == 1:  # reading others would wait
            found[name] = value.item()
    betas = group.get("betas")
    if isinstance(betas, (tuple, list)) and all(isinstance(beta, (float, int)) for beta in betas[:2]):
        found.update(zip(("beta 1", "beta 2"), betas, strict=False))
    return found


def values_of(
    names: Sequence[str], parameters: Sequence[Tensor], local: Container[int]
) -> Iterator[tuple[str, Any] | None]:
    """Name and bytes of each parameter, None for one that is frozen.

    A parameter that is sparse, without data or a rank's own has None in place of the pair.

    Args:
        names: of the parameters.
        parameters: of the optimizer.
        local: positions of those that each rank keeps for itself.
    """
    for position, (name, parameter) in enumerate(zip(names, parameters, strict=True)):
        is_dense = parameter.layout is torch.strided and not parameter.is_meta
        if position in local or not is_dense:
            yield None
        elif not parameter.requires_grad:
            yield name, None
        else:
            yield name, _bytes_of(parameter)


def checksums_of_states(parameters: Sequence[Tensor], states: Mapping[Any, Any]) -> dict[int, int]:
    """Checksums of an optimizer's states, by position of the parameter; none for one without a state.

    Args:
        parameters: of the optimizer.
        states: its ``state``.
    """
    found = {}
    for position, parameter in enumerate(parameters):
        state = states.get(parameter)
        if isinstance(state, Mapping) and state:
            checksum = 0
            for name in sorted(map(str, state)):
                checksum = zlib.crc32(name.encode(), checksum)
                value = state.get(name)
                if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
                    checksum = zlib.crc32(np.uint32(_core.crc32c(_bytes_of(value))).tobytes(), checksum)
                elif isinstance(value, (float, int)):
                    checksum = zlib.crc32(np.float64(value).tobytes(), checksum)
            found[position] = checksum
    return found


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
