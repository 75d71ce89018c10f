"""Parameters and optimizer state from one rank to all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from polyhvd.torch.base import adapter, collectives, increment_version

from polyhvd import context
from polyhvd.errors import InvalidArgumentError, RankMismatchError
from polyhvd.process_sets import ProcessSet, global_process_set
from polyhvd.state_sync import allgather_object, broadcast_named, broadcast_object

__all__ = ["broadcast_optimizer_state", "broadcast_parameters"]

Tensor = torch.Tensor


def broadcast_parameters(
    params: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite tensors with the root's.

    Args:
        params: ``model.state_dict()``, ``model.named_parameters()`` or the like; the same names, shapes and
            dtypes on every rank.
        root_rank: world rank of the sender.
        process_set: the ranks that take part.

    Raises:
        InvalidArgumentError: something in ``params`` is not a tensor, or has no shape yet.
        RankMismatchError: shapes or dtypes differ between ranks.
    """
    named = list(adapter.named_parameters(params))
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise InvalidArgumentError(
                f"broadcast_parameters: {name!r} is not a tensor but {type(tensor).__name__}; "
                "use broadcast_object for it"
            )
        if torch.nn.parameter.is_lazy(tensor):
            raise InvalidArgumentError(
                f"broadcast_parameters: {name!r} has no shape yet; run the model once before"
            )
    for some in _without_shared_memory(named):
        broadcast_named(collectives, some, root_rank, process_set)
    for _, tensor in named:
        increment_version(tensor)


def _without_shared_memory(named: list[tuple[str, Tensor]]) -> list[list[tuple[str, Tensor]]]:
    """Lists of tensors that can be in flight together; the same tensor (tied weights) once."""
    lists: list[list[tuple[str, Tensor]]] = [[]]
    seen: set[Any] = set()
    storages: set[int] = set()
    for name, tensor in named:
        view = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() > 0:
            if view in seen:
                continue
            seen.add(view)
            storage = tensor.untyped_storage().data_ptr()
            if storage in storages:
                lists.append([])
                storages = set()
            storages.add(storage)
        lists[-1].append((name, tensor))
    return lists


class _Placeholder:
    """Stands for a tensor in the state that is sent."""

    def __init__(self, number: int) -> None:
        self.number = number


def _transform(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of nested dicts, lists and tuples in which ``change`` was applied to the leaves."""
    if isinstance(value, dict):
        return {key: _transform(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value)(_transform(item, change) for item in value)
    return change(value)


def _take_tensors(state: Any) -> tuple[Any, list[Tensor]]:
    """The state with placeholders, and the tensors, no two of which share memory."""
    tensors: list[Tensor] = []
    storages: set[int] = set()

    def take(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage().data_ptr()
        tensors.append(value.detach().clone() if storage in storages else value.detach())
        storages.add(storage)
        return _Placeholder(len(tensors) - 1)

    return _transform(state, take), tensors


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give every rank the root's optimizer state and hyperparameters. Takes no step.

    Args:
        optimizer: of the same parameters on every rank; its state may be empty anywhere.
        root_rank: world rank of the sender.
        model: accepted for compatibility, and not needed.

    Raises:
        RankMismatchError: the ranks' parameter groups differ.
    """
    is_root = context.config().rank == root_rank
    _check_groups(optimizer, root_rank)
    state: Any = None
    tensors: list[Tensor] = []
    if is_root:
        state, tensors = _take_tensors(optimizer.state_dict())
    kinds = [(adapter.dtype(t), tuple(t.shape)) for t in tensors]
    state, kinds = broadcast_object((state, kinds), root_rank, name="optimizer_state")
    if not is_root:
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in kinds]
    named = [(str(i), tensor) for i, tensor in enumerate(tensors)]
    broadcast_named(collectives, named, root_rank, prefix="optimizer_state")
    if not is_root:
        _load(optimizer, _transform(state, lambda v: tensors[v.number] if isinstance(v, _Placeholder) else v))


def _check_groups(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    groups = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    every = allgather_object(groups, name="optimizer_state.groups")
    different = [rank for rank, other in enumerate(every) if other != every[root_rank]]
    if different:
        raise RankMismatchError(
            f"broadcast_optimizer_state: ranks {different} have other parameters than root rank {root_rank}, "
            "in shape, number or grouping; build the same optimizer on every rank"
        )


def _load(optimizer: torch.optim.Optimizer, state: Any) -> None:
    optimizer.load_state_dict(state)
    # torch casts state to the dtype of its parameter; the root has it as it is.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        own = optimizer.state.get(parameter, {})
        for key, value in state["state"].get(number, {}).items():
            loaded = own.get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and loaded.dtype != value.dtype:
                own[key] = value
