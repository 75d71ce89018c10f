"""Parameters and optimizer state from one rank to all."""

from __future__ import annotations

from typing import Any

import torch
from polyhvd.torch.base import adapter, collectives, increment_version

from polyhvd.collectives.objects import broadcast_object
from polyhvd.collectives.operation import process_set_id
from polyhvd.collectives.process_sets import ProcessSet, global_process_set
from polyhvd.errors import InvalidArgumentError, RankMismatchError
from polyhvd.runtime import current
from polyhvd.training.state import broadcast_named, by_rank, put_tensors, take_tensors

__all__ = ["broadcast_optimizer_state", "broadcast_parameters", "load_state"]

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
        RankMismatchError: names, shapes or dtypes differ between ranks.
        NotInitializedError: before ``init()``.

    Example::

        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
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
                f"broadcast_parameters: {name!r} has no shape yet; run the model once first"
            )
    rounds = _without_shared_memory(named)
    names: list[str] | None = [
        f"{name} (shares memory with others)" if number else str(name)
        for number, some in enumerate(rounds)
        for name, _ in some
    ]
    with current.world().line("broadcast_parameters", process_set_id(process_set)):
        for some in rounds:
            broadcast_named(collectives, some, root_rank, process_set, names=names)
            names = None  # the ranks have compared them
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


def _without_shared_storage(tensors: list[Tensor]) -> list[Tensor]:
    """The same values, no two of which share memory: all are in flight together."""
    apart: list[Tensor] = []
    storages: set[int] = set()
    for tensor in tensors:
        storage = tensor.untyped_storage().data_ptr()
        apart.append(tensor.detach().clone() if storage in storages else tensor.detach())
        storages.add(storage)
    return apart


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Give every rank the root's optimizer state and hyperparameters. Takes no step.

    Args:
        optimizer: of the same parameters on every rank; its state may be empty anywhere.
        root_rank: world rank of the sender.
        model: accepted for compatibility, and not needed.
        process_set: the ranks that take part.

    Raises:
        RankMismatchError: the ranks' classes of optimizers or parameter groups differ.
        NotInitializedError: before ``init()``.

    Example::

        if hvd.rank() == 0:
            optimizer.load_state_dict(torch.load("optimizer.pt"))
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    """
    if current.world().engine.behind:
        return  # before an elastic function, whose state has it
    with current.world().line("broadcast_optimizer_state", process_set_id(process_set)):
        _check_groups(optimizer, root_rank, process_set)
        state = _received_state(optimizer, root_rank, process_set)
    if current.world().placement.rank != root_rank:
        load_state(optimizer, state)


def _received_state(optimizer: torch.optim.Optimizer, root_rank: int, process_set: ProcessSet) -> Any:
    """The root's state, on every rank."""
    is_root = current.world().placement.rank == root_rank
    state: Any = None
    tensors: list[Tensor] = []
    if is_root:
        state, tensors = take_tensors(optimizer.state_dict(), torch.is_tensor)
        tensors = _without_shared_storage(tensors)
    kinds = [(adapter.dtype(t), tuple(t.shape)) for t in tensors]
    state, kinds = broadcast_object((state, kinds), root_rank, "optimizer_state", process_set)
    if not is_root:
        tensors = [torch.empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in kinds]
    named = [(str(i), tensor) for i, tensor in enumerate(tensors)]
    broadcast_named(collectives, named, root_rank, process_set, "optimizer_state")
    return put_tensors(state, tensors)


def _check_groups(optimizer: torch.optim.Optimizer, root_rank: int, process_set: ProcessSet) -> None:
    groups = [[tuple(p.shape) for p in group["params"]] for group in optimizer.param_groups]
    own, name = (type(optimizer).__name__, groups), "optimizer_state.groups"
    every = by_rank("broadcast_optimizer_state", own, name, root_rank, process_set)
    kind, expected = every[root_rank]
    if others := {rank: name for rank, (name, _) in every.items() if name != kind}:
        raise RankMismatchError(
            f"broadcast_optimizer_state: ranks {list(others)} have {', '.join(sorted({*others.values()}))}, "
            f"and root rank {root_rank} has {kind}; build the same optimizer on every rank"
        )
    different = [rank for rank, (_, other) in every.items() if other != expected]
    if different:
        raise RankMismatchError(
            f"broadcast_optimizer_state: ranks {different} have other parameters than root rank {root_rank}, "
            "in shape, number or grouping; build the same optimizer on every rank"
        )


def load_state(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Load what ``state_dict()`` has returned, tensors of their own dtypes included.

    Tensors of a parameter's shape get its strides, as those have that the optimizer makes: fused kernels
    pair elements as they lie in memory, whatever the strides are.
    """
    optimizer.load_state_dict(state)
    # torch casts state to the dtype of its parameter; the root has it as it is.
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        own = optimizer.state.get(parameter, {})
        for key, value in state["state"].get(number, {}).items():
            loaded = own.get(key)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor):
                own[key] = _laid_out(loaded if loaded.dtype == value.dtype else value, parameter)


def _laid_out(value: Tensor, parameter: Tensor) -> Tensor:
    """A tensor of the parameter's shape with the parameter's strides; any other as it is."""
    is_strided = value.layout is parameter.layout is torch.strided
    if not is_strided or value.shape != parameter.shape or value.stride() == parameter.stride():
        return value
    with torch.no_grad():
        return torch.empty_like(parameter, dtype=value.dtype, device=value.device).copy_(value)
