"""Elastic training with PyTorch: ``hvd.elastic``."""

from __future__ import annotations

import abc
import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from polyhvd.torch.adapter import copy_all
from polyhvd.torch.samplers import ElasticSampler
from polyhvd.torch.state import broadcast_optimizer_state, broadcast_parameters, load_state

from polyhvd.collectives.objects import broadcast_object
from polyhvd.collectives.process_sets import ProcessSet
from polyhvd.elastic import exports
from polyhvd.elastic.exports import *
from polyhvd.elastic.loop import run, run_fn
from polyhvd.elastic.memory import pieces
from polyhvd.elastic.state import Handler, HandlersState
from polyhvd.elastic.train import train
from polyhvd.training.state import changed, put_tensors, take_tensors

__all__ = [
    "ElasticSampler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "run",
    "run_fn",
    "set_handler_registry",
    "train",
]
__all__ += exports.__all__

Tensor = torch.Tensor


class StateHandler(Handler):
    """How a :class:`TorchState` keeps a value of some class; see :func:`set_handler_registry`.

    Args:
        value: what it keeps.

    Example::

        class CounterHandler(hvd.elastic.StateHandler):
            def save(self): self._saved = self.value.count
            def restore(self): self.value.count = self._saved
            def sync(self): self.value.count = hvd.broadcast_object(self.value.count)
    """


def blank(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Empty tensors on the CPU, as ``empty_like`` makes them; strided ones side by side in one buffer."""
    devices = ["meta" if _is_strided(tensor) else "cpu" for tensor in tensors]
    made = [
        torch.empty_like(tensor, requires_grad=False, device=device)
        for tensor, device in zip(tensors, devices, strict=True)
    ]
    parts = pieces([form.untyped_storage().nbytes() if form.is_meta else 0 for form in made])
    return [
        torch.from_numpy(part).view(form.dtype).as_strided(form.shape, form.stride())
        if form.is_meta
        else form
        for part, form in zip(parts, made, strict=True)
    ]


def _is_strided(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and not tensor.is_quantized
    return is_plain and tensor.layout is torch.strided


class _TensorsHandler(StateHandler, abc.ABC):
    """Copies of the tensors of a state dict, in memory of the host that is used again."""

    def __init__(self, value: Any) -> None:
        self._tensors: list[Tensor] = []
        self._spare: list[Tensor] = []  # of the commit before: one that is cut short harms neither
        super().__init__(value)

    def save(self) -> None:
        rest, tensors = take_tensors(self.value.state_dict(), torch.is_tensor)
        spare = self._spare
        if _likes(spare) != _likes(tensors):
            spare = blank(tensors)
        copy_all(spare, tensors)
        saved = copy.deepcopy(rest)
        self._rest, self._tensors, self._spare = saved, spare, self._tensors

    def exported(self) -> Any:
        return changed(self.value.state_dict(), _packed)

    def _saved(self, tensors: list[Tensor]) -> Any:
        return put_tensors(copy.deepcopy(self._rest), tensors)

    def forget_gradients(self) -> None:
        """Drop the gradients of a step that is undone or used up, so that the next step starts at 0."""
        for parameter in self._parameters():
            parameter.grad = None

    @abc.abstractmethod
    def _parameters(self) -> Iterable[Tensor]:
        """The parameters whose gradients are forgotten."""


class _ModelHandler(_TensorsHandler):
    def _parameters(self) -> Iterable[Tensor]:
        parameters: Iterable[Tensor] = self.value.parameters()
        return parameters

    def keep_synced(self, *, kept: bool) -> None:
        if not kept or any(not torch.is_tensor(value) for value in self.value.state_dict().values()):
            if not self._spare:  # an earlier commit is of no use any more, its memory is
                self._tensors, self._spare = [], self._tensors
            self.save()

    def restore(self) -> None:
        self.value.load_state_dict(self._saved(self._tensors))
        self.forget_gradients()

    def imported(self, value: Any) -> None:
        self.value.load_state_dict(_unpacked(value))

    def sync_from(self, root: int, *, among: ProcessSet | None) -> None:
        state = self.value.state_dict()
        tensors = {name: value for name, value in state.items() if torch.is_tensor(value)}
        if among is not None and tensors:
            broadcast_parameters(tensors, root, among)
        if len(tensors) < len(state):  # a module may keep anything there
            others = {name: value for name, value in state.items() if name not in tensors}
            others = broadcast_object(others, root, name="elastic.state.model")
            self.value.load_state_dict({**tensors, **others})


class _OptimizerHandler(_TensorsHandler):
    def _parameters(self) -> Iterable[Tensor]:
        return (parameter for group in self.value.param_groups for parameter in group["params"])

    def keep_synced(self, *, kept: bool) -> None:
        if not kept:
            self.save()

    def restore(self) -> None:
        # It takes tensors over as they are, and changes them in its steps.
        load_state(self.value, self._saved([tensor.clone() for tensor in self._tensors]))
        self.forget_gradients()

    def imported(self, value: Any) -> None:
        load_state(self.value, _unpacked(value))

    def sync_from(self, root: int, *, among: ProcessSet | None) -> None:
        if among is not None:
            broadcast_optimizer_state(self.value, root, process_set=among)


class _StatefulHandler(StateHandler):
    """Schedulers, scalers, samplers: small states."""

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(copy.deepcopy(self._saved))
        stages = getattr(self.value, "_per_optimizer_states", None)  # a GradScaler's: within a step
        if isinstance(stages, dict):
            stages.clear()

    def exported(self) -> Any:
        return changed(self.value.state_dict(), _packed)

    def imported(self, value: Any) -> None:
        self.value.load_state_dict(_unpacked(value))

    def sync_from(self, root: int, *, among: ProcessSet | None) -> None:
        state = self.value.state_dict()
        self.value.load_state_dict(broadcast_object(state, root, name="elastic.state.stateful"))


_TENSOR = "torch.Tensor"  # in checkpoints, the key of its dtype


def _packed(value: Any) -> Any:
    """A tensor as bytes with its dtype, of which NumPy does not have all."""
    if not torch.is_tensor(value):
        return value
    host = value.detach().cpu().contiguous()
    raw = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else np.empty(0, np.uint8)
    return {_TENSOR: str(host.dtype).removeprefix("torch."), "shape": list(host.shape), "bytes": raw}


def _unpacked(value: Any) -> Any:
    """The inverse of :func:`_packed` in nested containers."""
    if type(value) is dict and _TENSOR in value:
        dtype = getattr(torch, value[_TENSOR])
        if not value["bytes"].size:
            return torch.empty(value["shape"], dtype=dtype)
        return torch.from_numpy(value["bytes"].copy()).view(dtype).reshape(value["shape"])
    if type(value) is dict:
        return {key: _unpacked(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_unpacked(item) for item in value)
    return value


def _likes(tensors: list[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


class _AnythingWithState(type):
    """Stands in the registry for every class with ``state_dict`` and ``load_state_dict``."""

    def __instancecheck__(cls, value: Any) -> bool:
        return callable(getattr(value, "state_dict", None)) and hasattr(value, "load_state_dict")


class _Stateful(metaclass=_AnythingWithState):
    pass


_registry: list[tuple[type, Callable[[Any], Handler]]] = [
    (torch.nn.Module, _ModelHandler),
    (torch.optim.Optimizer, _OptimizerHandler),
    (_Stateful, _StatefulHandler),
]


def get_handler_registry() -> list[tuple[type, Callable[[Any], Handler]]]:
    """Classes of values that :class:`TorchState` does not pickle, each with its :class:`StateHandler`.

    Returns:
        Pairs, of which the first counts whose class a value is of: modules, optimizers, and whatever has
        ``state_dict()`` and ``load_state_dict()``, such as samplers and schedulers.

    Example::

        hvd.elastic.set_handler_registry([(Counter, CounterHandler), *hvd.elastic.get_handler_registry()])
    """
    return list(_registry)


def set_handler_registry(registry: list[tuple[type, Callable[[Any], Handler]]]) -> None:
    """Replace what :func:`get_handler_registry` returns, for states that are made from now on.

    Args:
        registry: pairs of a class and a function that makes a :class:`StateHandler` of a value.

    Example::

        hvd.elastic.set_handler_registry([(Counter, CounterHandler), *hvd.elastic.get_handler_registry()])
    """
    _registry[:] = registry


class TorchState(HandlersState):
    """A model, an optimizer and other attributes, by name.

    Modules and optimizers keep their tensors over all changes of the world. Samplers, learning rate
    schedulers and gradient scalers are kept by their ``state_dict()``; everything else is pickled.

    Args:
        model: a ``torch.nn.Module``, or None.
        optimizer: a ``DistributedOptimizer`` or another, or None.
        kwargs: other attributes with their first values.

    Example::

        state = hvd.elastic.TorchState(model, optimizer, epoch=0, batch=0)

        @hvd.elastic.run
        def train(state):
            for state.epoch in range(state.epoch, 10):
                train_one_epoch(state.model, state.optimizer)
                state.commit()
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        **kwargs: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer}
        kwargs.update({name: value for name, value in given.items() if value is not None})
        handlers = {}
        for name, value in kwargs.items():
            make = next((handler for kind, handler in _registry if isinstance(value, kind)), None)
            if make is not None:
                handlers[name] = make(value)
        rest = {name: value for name, value in kwargs.items() if name not in handlers}
        super().__init__(handlers, **rest)
        self.register_local("torch", lambda: torch.get_rng_state().numpy(), _set_rng_state)
        for name, value in given.items():
            if value is None:
                setattr(self, name, None)

    def reset(self) -> None:
        """Drop the gradients of the former world, which ranks that have just joined do not have.

        Example::

            state.reset()
        """
        for handler in self._handlers.values():
            if isinstance(handler, _TensorsHandler):
                handler.forget_gradients()


def _set_rng_state(value: Any) -> None:
    torch.set_rng_state(torch.from_numpy(value.copy()))


def __dir__() -> list[str]:
    return __all__
